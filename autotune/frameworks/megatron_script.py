"""Exports the arguments of Megatron-LM's pretrain_gpt.py (names as in commit 000c4ac24f61, see tests)."""

from autotune.frameworks.best_config import Winner
from autotune.frameworks.export import (
    Checkpoints,
    Export,
    ExportTarget,
    header,
    lacking,
    marks_note,
    remarks,
    spelled,
    spelled_words,
    unstated_note,
)
from autotune.frameworks.framework import BATCH, knobs_of
from autotune.frameworks.launch import environment, torchrun_words
from autotune.frameworks.megatron import LM, SHARDING, Dialect, options_of
from autotune.frameworks.peft import ADAPTER_KNOBS, megatron_bridge_notes
from search_spaces.communication import INT8
from search_spaces.kernels import ENGINE_ATTENTION
from search_spaces.knobs.computation import MODULES, MXFP8, TENSORWISE, modules_in
from search_spaces.models.model import ModelSpec, Norm, Position
from search_spaces.models.pipeline import split_layers
from search_spaces.optimizers import GROWTH_INTERVAL, INITIAL_SCALE_POWER, LEAST_SCALE, SGD_MOMENTUM
from search_spaces.trial_config import TrialConfig

OPTIONS = options_of(Dialect(LM))
OPTION_OF = {option.knob: option.key for option in OPTIONS if option.knob}
TARGET = ExportTarget(
    format="megatron",
    name="Megatron-LM's arguments",
    expressed=knobs_of(OPTIONS) | spelled("megatron") | ADAPTER_KNOBS | {
        "reduce_dtype", "hsdp_shard_size", "virtual_stages", "pipeline_schedule", "pipeline_split", "pipeline_layout",
        "checkpoint_every_k", "precision", "expandable_segments", "optimizer", "environment", "attention_window",
        "mtp_loss_weight", "offload_activations", "async_tensor_parallel", "cuda_graphs", "recompute_modules",
        "fp8_recipe",
    },
    elsewhere={
        "prefetch_bucket_size": "--suggested-communication-unit-size is the nearest, for gathers and reductions together",
        "reshard_after_forward": "Megatron-FSDP always frees parameters after forward",
        "fused_kernels": "its layers are Transformer Engine's, with fused norms, rotations and SwiGLU of its own; "
        "--cross-entropy-loss-fusion is the nearest to a fused loss",
        "offload_param": "Megatron-LM keeps parameters on the device",
        "pack_sequences": "its datasets always join documents and cut them where a row ends; --reset-position-ids, "
        "--reset-attention-mask and --eod-mask-loss keep them apart",
        "loss_chunk_size": "--cross-entropy-loss-fusion saves some of that memory",
        "allgather_bucket_size": "parameters are gathered in the buckets of --ddp-bucket-size",
        "attention_global_tokens": "--window-size speaks of neighbours alone; write a mask of your own",
    },
)  # fmt: skip
BUILT_IN = (
    "experts", "a capacity of experts", "a load-balance loss", "tied embeddings", "latent attention", "shared experts",
    "dense layers beside those with experts", "weights of experts that are sigmoids", "a bias of the choice of experts",
    "groups of experts", "a factor of experts' weights",
)  # fmt: skip
LOOPED = ("1f1b", "interleaved_1f1b")
"""Pipeline schedules that Megatron-LM has."""


def export_megatron(winner: Winner) -> Export:
    """Return a shell script: the arguments as an array, and the line that launches them."""
    notes = remarks(winner, _notes(winner), Checkpoints.MEGATRON)
    sections = {"the layout": _layout(winner), "the model": _model(winner)}
    body = "".join(f"  # {title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items() if lines)
    launch = " ".join([*torchrun_words(winner), 'pretrain_gpt.py "${ARGUMENTS[@]}" "$@"'])
    text = f"#!/bin/bash\n{header(winner, 'Megatron-LM', notes)}{_environment(winner)}ARGUMENTS=(\n{body})\nexec {launch}\n"
    return Export(text=text, notes=notes)


def _environment(winner: Winner) -> str:
    # Megatron-LM requires one hardware queue if it overlaps tensor-parallel or context-parallel communication.
    overlaps = winner.config.tensor_parallel_size > 1 or winner.config.context_parallel_size > 1
    queues = "CUDA_DEVICE_MAX_CONNECTIONS"
    return environment(winner) + (f"export {queues}=1\n" if overlaps and queues not in winner.env else "")


def _layout(winner: Winner) -> list[str]:
    config, workload = winner.config, winner.workload
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "micro_batch_size")
    lines = [
        *(f"{OPTION_OF[knob]} {getattr(config, knob)}" for knob in sizes),
        f"{OPTION_OF[BATCH]} {workload.global_batch_size}",
        f"--seq-length {workload.sequence_length}",
        *_stated(winner),
    ]
    if not winner.on_gpus:
        lines.append("--distributed-backend gloo")
    lines += spelled_words(config, "megatron")
    if config.mtp_layers:  # Megatron-LM has another default
        lines.append(f"--mtp-loss-scaling-factor {config.mtp_loss_weight}")
    if _captures(config):
        lines += ["--cuda-graph-impl local", "--te-rng-tracker"]
    if _offloads_activations(winner) and winner.shape is not None:
        lines.append(f"--cpu-offloading-num-layers {winner.shape.num_layers - 1}")
    return [*lines, *_parallel(winner), *_sharded(winner), *_precision(config), *_recomputed(config)]


def _stated(winner: Winner) -> list[str]:
    """Hyperparameters. Megatron-LM needs a learning rate: if none is stated, the script reads the variable LR."""
    hyperparameters = winner.hyperparameters
    lines = ['--lr "${LR:?your learning rate}"' if hyperparameters.lr is None else f"--lr {hyperparameters.lr}"]
    if hyperparameters.weight_decay is not None:
        lines.append(f"--weight-decay {hyperparameters.weight_decay}")
    if hyperparameters.clip is not None:
        lines.append(f"--clip-grad {hyperparameters.clip}")
    if hyperparameters.optimizer is not None:
        lines += {"sgd": ["--optimizer sgd", f"--sgd-momentum {SGD_MOMENTUM}"], "adamw": ["--optimizer adam"]}.get(
            hyperparameters.optimizer, []
        )
    return lines


def _offloads_activations(winner: Winner) -> bool:
    """Whether Megatron-LM can offload them: for a model with known layers, on one pipeline rank, without recomputation."""
    config = winner.config
    supported = config.pipeline_parallel_size == 1 and config.activation_checkpointing == "none"
    return config.offload_activations and supported and winner.shape is not None and winner.shape.num_layers > 1


def _captures(config: TrialConfig) -> bool:
    """Whether Megatron-LM can capture whole layers as CUDA graphs. Megatron-FSDP gathers and frees parameters dynamically."""
    return config.cuda_graphs and config.zero_stage < 2


def _parallel(winner: Winner) -> list[str]:
    config, lines = winner.config, []
    if config.sequence_parallel:
        lines.append("--sequence-parallel")
        if config.async_tensor_parallel:
            lines.append("--tp-comm-overlap")
    if config.expert_parallel_size > 1:
        lines.append(f"{OPTION_OF['expert_parallel_size']} {config.expert_parallel_size}")
    if config.context_parallel_method == "ulysses":
        lines.append("--cp-comm-type a2a")
    if config.attention_window:  # the number of tokens before and after the current one
        lines.append(f"--window-size {config.attention_window - 1},0")
    if config.rank_order == "tp-cp-pp-dp":
        lines.append("--use-tp-pp-dp-mapping")
    if config.attention_backend in ENGINE_ATTENTION:
        lines.append(f"--attention-backend {ENGINE_ATTENTION[config.attention_backend]}")
    if config.pipeline_parallel_size > 1 and winner.shape is not None and config.pipeline_schedule in LOOPED:
        layout = pipeline_layout(winner.shape, config, winner.workload.sequence_length)
        lines.append(f"--pipeline-model-parallel-layout '{layout}'")
    return lines


def pipeline_layout(shape: ModelSpec, config: TrialConfig, sequence_length: int) -> str:
    """The layers of every stage as `Ett|tt|tt|tmL`: E is the embedding, t a layer, m a module for multi-token prediction and
    L the loss.

    Megatron-LM assigns the stages to the ranks in turn, as the schedules of `LOOPED` do.
    """
    parts = ["t" * len(layers) for layers in split_layers(shape, config, sequence_length)]
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}{'m' * config.mtp_layers}L"
    return "|".join(parts)


def _sharded(winner: Winner) -> list[str]:
    config, lines = winner.config, [f"{OPTION_OF['reduce_bucket_size']} {winner.config.reduce_bucket_size}"]
    if config.overlap_comm:
        lines.append("--overlap-grad-reduce")
    if config.zero_stage >= 1:
        # Megatron-FSDP gathers on use; there the same option makes it prefetch.
        ahead = config.overlap_comm and (config.overlap_param_gather or config.zero_stage == 3)
        lines += ["--use-distributed-optimizer", *(["--overlap-param-gather"] if ahead else [])]
    if config.zero_stage >= 2:
        lines += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {SHARDING[config.zero_stage]}"]
        lines.append("--ckpt-format fsdp_dtensor")
    if (copies := winner.zero_ranks // winner.shard_size) > 1:
        lines.append(f"--num-distributed-optimizer-instances {copies}")
    if config.offload_optimizer == "cpu":
        lines += ["--optimizer-cpu-offload", f"--optimizer-offload-fraction {config.offload_ratio}"]
    return lines


def _precision(config: TrialConfig) -> list[str]:
    lines = {
        "bf16": ["--bf16"],
        "fp8": ["--bf16", *(
            ["--fp8-format e4m3", "--fp8-recipe mxfp8"] if config.fp8_recipe == MXFP8
            else ["--fp8-format hybrid", "--fp8-recipe tensorwise"]
        )],
        "fp16": [
            "--fp16", f"--initial-loss-scale {2**INITIAL_SCALE_POWER}", f"--loss-scale-window {GROWTH_INTERVAL}",
            "--hysteresis 1", f"--min-loss-scale {LEAST_SCALE:g}",
        ],
    }.get(config.precision, [])  # fmt: skip
    if config.reduce_dtype == "bf16":
        return [*lines, "--grad-reduce-in-bf16"]
    in_fp32 = bool(lines) and config.accumulation_dtype == "fp32"
    return [*lines, "--accumulate-allreduce-grads-in-fp32"] if in_fp32 else lines


def _recomputed(config: TrialConfig) -> list[str]:
    match config.activation_checkpointing:
        case "selective":
            return ["--recompute-granularity selective"]
        case "full":
            return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
        case _:
            modules = [MODULES[name] for name in modules_in(config.recompute_modules) if MODULES[name]]
            return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"] if modules else []


def _model(winner: Winner) -> list[str]:
    shape = winner.shape
    if shape is None:
        return []
    lines = [
        f"--num-layers {shape.num_layers}",
        f"--hidden-size {shape.hidden_size}",
        f"--ffn-hidden-size {shape.dense_ffn_size or shape.ffn_hidden_size}",
        f"--num-attention-heads {shape.num_attention_heads}",
        f"--kv-channels {shape.head_dim}",
        f"--max-position-embeddings {max(shape.sequence_length, winner.workload.sequence_length)}",
        f"--vocab-size {shape.vocab_size}",
        f"--norm-epsilon {shape.norm_epsilon}",
        "--attention-dropout 0",
        "--hidden-dropout 0",
    ]
    lines += [*_kinds(shape), *_latent(shape), *_routing(shape)]
    if shape.router_correction and not winner.config.router_bias_update_rate:  # Megatron-LM's default moves the bias
        lines.append("--moe-router-bias-update-rate 0")
    return lines


def _latent(shape: ModelSpec) -> list[str]:
    """Latent attention; `rotary-base` and the scaling of rotations are given with the other arguments."""
    latent = shape.latent
    if latent is None:
        return []
    query = [f"--q-lora-rank {latent.query_rank}"] if latent.query_rank else []
    return [
        "--multi-latent-attention", *query, f"--kv-lora-rank {latent.key_value_rank}",
        f"--qk-head-dim {shape.head_dim - latent.rotated}", f"--qk-pos-emb-head-dim {latent.rotated}",
        f"--v-head-dim {latent.value_size}",
    ]  # fmt: skip


def _routing(shape: ModelSpec) -> list[str]:
    """What experts have besides Mixtral's."""
    dense = [int(shape.has_experts(layer)) for layer in range(shape.num_layers)]
    frequency = "([" + ",".join(map(str, dense)) + "])"
    options = {
        f"--moe-ffn-hidden-size {shape.ffn_hidden_size} --moe-layer-freq '{frequency}'": any(shape.dense_layers),
        f"--moe-shared-expert-intermediate-size {shape.shared_expert_size}": shape.shared_expert_size > 0,
        "--moe-router-score-function sigmoid": shape.sigmoid_routing,
        "--moe-router-enable-expert-bias": shape.router_correction,
        f"--moe-router-num-groups {shape.router_groups} --moe-router-group-topk {shape.router_groups_kept}": (
            shape.router_groups > 1
        ),
        f"--moe-router-topk-scaling-factor {shape.routing_scale}": shape.routing_scale != 1,
    }
    return [line for line, holds in options.items() if holds]


def _kinds(shape: ModelSpec) -> list[str]:
    options = {
        f"--group-query-attention --num-query-groups {shape.num_key_value_heads}": (
            shape.num_key_value_heads != shape.num_attention_heads
        ),
        "--normalization RMSNorm": shape.norm is Norm.RMSNORM,
        f"--position-embedding-type rope --rotary-base {int(shape.rope_theta)} --rotary-percent {shape.rotary_fraction}": (
            shape.position is Position.ROTARY
        ),
        "--swiglu": shape.gated_mlp and shape.activation == "silu",
        "--untie-embeddings-and-output-weights": not shape.tied_embeddings,
        "--disable-bias-linear": not (shape.mlp_bias or shape.attention_output_bias),
        "--add-qkv-bias": shape.qkv_bias and not shape.attention_output_bias,
        f"--num-experts {shape.num_experts} --moe-router-topk {shape.experts_per_token}": shape.num_experts > 0,
        f"--moe-expert-capacity-factor {shape.capacity_factor} --moe-pad-expert-input-to-capacity "
        "--moe-token-drop-policy position": shape.capacity_factor > 0,
        f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff {shape.load_balance}": shape.load_balance > 0,
    }
    return [line for line, holds in options.items() if holds]


def _notes(winner: Winner) -> list[str]:
    config, shape = winner.config, winner.shape
    notes = ["add your data and tokenizer: --data-path, --tokenizer-type, --train-iters"]
    notes += unstated_note(winner, "the script takes it from the variable LR, as in LR=3e-4 bash FILE", "lr")
    notes += unstated_note(winner, "left out, Megatron-LM's own defaults hold", "weight_decay", "clip", "optimizer")
    if shape is None:
        notes.append(f"{winner.model.name}: its shape is not known; add --num-layers, --hidden-size and the rest")
    if shape is not None:
        notes += _shape_notes(shape)
    elif config.pipeline_parallel_size > 1:
        stages = f"virtual_stages={config.virtual_stages}, pipeline_split={config.pipeline_split}"
        notes.append(f"{stages}: give --pipeline-model-parallel-layout your model's layers")
    if config.precision == "fp8" and config.fp8_recipe not in (TENSORWISE, MXFP8):
        notes.append(f"fp8_recipe={config.fp8_recipe}: Transformer Engine has no scales of rows; tensorwise is written")
    if config.attention_backend not in ("best", *ENGINE_ATTENTION):
        notes.append(f"attention_backend={config.attention_backend}: Transformer Engine has no such kernel")
    if config.pipeline_parallel_size > 1 and config.pipeline_schedule not in LOOPED:
        notes.append(f"pipeline_schedule={config.pipeline_schedule}: Megatron-LM has 1f1b and its interleaved form alone")
        if config.virtual_stages > 1:
            notes.append(f"virtual_stages={config.virtual_stages}: left out with the schedule")
    notes += marks_note(config, "Megatron-LM")
    notes += [
        f"recompute_modules={name}: Megatron-LM recomputes it only with the whole MLP (--recompute-modules mlp)"
        for name in modules_in(config.recompute_modules)
        if not MODULES[name]
    ]
    if config.checkpoint_every_k > 1:
        notes.append(
            f"checkpoint_every_k={config.checkpoint_every_k}: Megatron-LM recomputes every layer, or the first of a stage"
        )
    if config.offload_optimizer == "nvme":
        notes.append("offload_optimizer=nvme: Megatron-LM offloads to main memory alone")
    if config.offload_activations and not _offloads_activations(winner):
        notes.append("offload_activations=True: Megatron-LM offloads by layers, without a pipeline and without recomputation")
    if config.cuda_graphs and not _captures(config):
        notes.append("cuda_graphs=True: look whether your version composes --cuda-graph-impl local with Megatron-FSDP")
    if config.overlap_param_gather and not config.overlap_comm:
        notes.append("overlap_param_gather=True: Megatron-LM takes it beside --overlap-grad-reduce alone")
    if config.async_tensor_parallel and not config.sequence_parallel:
        condition = "forward takes --sequence-parallel; in backward Megatron-LM has it anyway"
        notes.append(f"async_tensor_parallel=True: {condition}")
    if config.expert_parallel_size > 1 and config.tensor_parallel_size > 1 and not config.sequence_parallel:
        notes.append("expert_parallel_size with tensor_parallel_size: Megatron-LM has both beside --sequence-parallel alone")
    if config.precision == "fp64" or config.reduce_dtype in ("fp16", INT8):
        notes.append(f"precision={config.precision}, reduce_dtype={config.reduce_dtype}: not among Megatron-LM's")
    if winner.gradient_accumulation_steps > 1 and config.accumulation_dtype != config.reduce_dtype:
        notes.append(f"accumulation_dtype={config.accumulation_dtype}: Megatron-LM sums and reduces gradients in one type")
    if config.optimizer not in ("adamw", "sgd"):
        notes.append(f"optimizer={config.optimizer}: not among Megatron-LM's adam and sgd; later versions have muon")
    if config.zero_stage >= 2 and config.pipeline_parallel_size > 1:
        notes.append(f"zero_stage={config.zero_stage} in a pipeline: look whether your version composes Megatron-FSDP with it")
    return notes + megatron_bridge_notes(winner) + TARGET.unexpressed(config)


def _shape_notes(shape: ModelSpec) -> list[str]:
    """Notes about properties of the model's shape that no argument expresses."""
    missing, notes = lacking(shape, BUILT_IN), []
    if missing:
        notes.append(f"pretrain_gpt.py's model is written without {', '.join(missing)}: add them")
    if shape.capacity_factor:
        notes.append("Megatron-LM fills its experts by micro-batch, not by sequence: other tokens may be dropped")
    if (shape.activation == "silu") != shape.gated_mlp or shape.activation not in ("silu", "gelu", "gelu_tanh"):
        notes.append(f"the model's activation {shape.activation} is not one of pretrain_gpt.py's")
    if shape.mlp_bias != shape.attention_output_bias or (shape.attention_output_bias and not shape.qkv_bias):
        notes.append("only some of the model's matrices have a bias, and --disable-bias-linear speaks of all of them")
    return notes
