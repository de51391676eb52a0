"""Exports files for `accelerate launch --config_file`: FSDP2 or DeepSpeed."""

from typing import Any

from autotune.exports import peft
from autotune.exports.checkpoints import Checkpoints
from autotune.exports.coverage import ExportTarget, unplaced_notes
from autotune.exports.deepspeed import SAME, deepspeed_notes
from autotune.exports.export import Export, header, remarks, yaml_text
from autotune.exports.fsdp2 import DECODER_LAYERS, fsdp2_notes, reduction_note, replicas
from autotune.exports.winner import Winner
from search_spaces.trial_config import TrialConfig

FSDP = ExportTarget(
    format="accelerate-fsdp",
    name="an Accelerate file for FSDP",
    expressed=frozenset({
        "zero_stage", "precision", "reshard_after_forward", "hsdp_shard_size", "offload_param", "offload_optimizer",
        "tensor_parallel_size", "context_parallel_size", "activation_checkpointing", "micro_batch_size", "reduce_dtype",
        "compile_blocks", *peft.KNOBS,
    }),
    elsewhere={
        "sequence_parallel": "the model's own tensor-parallel plan decides it",
        "fused_optimizer": "make the optimizer with foreach=True",
        "context_parallel_method": "Accelerate exchanges heads with DeepSpeed alone: parallelism_config_sp_size in "
        "the place of parallelism_config_cp_size, and sp_backend deepspeed",
    },
    refused={
        "pipeline_parallel_size": "torch, torchtitan, megatron or deepspeed",
        "expert_parallel_size": "megatron",
    },
)  # fmt: skip
DDP = ExportTarget(
    format="accelerate-fsdp",
    name="an Accelerate file for data parallelism",
    expressed=frozenset({"zero_stage", "precision", "micro_batch_size", "compile_blocks", *peft.KNOBS}),
    elsewhere={
        "reduce_bucket_size": "give accelerate.DistributedDataParallelKwargs its bytes as bucket_cap_mb",
        "reduce_dtype": "give accelerate.DistributedDataParallelKwargs a comm_hook",
    },
)
DEEPSPEED = ExportTarget(
    format="accelerate-deepspeed",
    name="an Accelerate file for DeepSpeed",
    expressed=frozenset(),
    refused={
        "pipeline_parallel_size": "deepspeed, with its PipelineModule",
        "context_parallel_size": "accelerate-fsdp, torchtitan or megatron",
        "expert_parallel_size": "megatron",
    },
)
DEEPSPEED_FILE = "ds_config.json"


def export_accelerate_fsdp(winner: Winner) -> Export:
    """Return the YAML for FSDP2, or for DistributedDataParallel at stage 0."""
    FSDP.require(winner.config)
    notes = remarks(winner, _fsdp_notes(winner), Checkpoints.DISTRIBUTED)
    content = _machines(winner, _kind(winner))
    if _sharded(winner.config):
        content["fsdp_config"] = _fsdp(winner)
    if _has_mesh(winner):
        content["parallelism_config"] = _mesh(winner)
    if winner.config.compile_blocks:
        content["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    return Export(text=header(winner, "accelerate launch --config_file", notes) + yaml_text(content), notes=notes)


def export_accelerate_deepspeed(winner: Winner) -> Export:
    """Return the YAML that refers to the DeepSpeed configuration in the same folder."""
    DEEPSPEED.require(winner.config)
    beside = (
        f"the knobs are in {DEEPSPEED_FILE} beside this file: `autotune export --format deepspeed --out {DEEPSPEED_FILE}`",
        *(
            ["it has the optimizer too: give accelerator.prepare an accelerate.utils.DummyOptim"]
            if winner.hyperparameters.optimizer
            else []
        ),
        *_machine_notes(winner),
    )
    notes = remarks(winner, [*beside, *deepspeed_notes(winner)], Checkpoints.DEEPSPEED, SAME)
    content = _machines(winner, "DEEPSPEED")
    # The DeepSpeed file states it, and Accelerate refuses a second statement.
    del content["mixed_precision"]
    settings: dict[str, Any] = {
        "deepspeed_config_file": DEEPSPEED_FILE,
        "zero3_init_flag": winner.config.zero_stage == 3,
    }
    if winner.nodes > 1:
        settings["deepspeed_multinode_launcher"] = "standard"
    content["deepspeed_config"] = settings
    return Export(text=header(winner, "accelerate launch --config_file", notes) + yaml_text(content), notes=notes)


def _machines(winner: Winner, kind: str) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": winner.config.precision if winner.config.precision in ("bf16", "fp16", "fp8") else "no",
        "num_machines": winner.nodes,
        "num_processes": winner.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not winner.on_gpus,
    }


def _machine_notes(winner: Winner) -> list[str]:
    if not winner.on_gpus and winner.world_size > 1:
        ranks = f"torchrun --nnodes={winner.nodes} --nproc-per-node={winner.ranks_per_node} train.py"
        start = f"start the ranks by `ACCELERATE_USE_CPU=true {ranks}`, with these settings in Accelerate's other variables"
        return [f"on CPUs `accelerate launch` starts one process: {start}"]
    if winner.nodes == 1:
        return []
    return [
        "give each machine its own --machine_rank, and all of them the first one's --main_process_ip and a --main_process_port"
    ]


def _sharded(config: TrialConfig) -> bool:
    """Whether parameters are DTensors: Accelerate combines tensor and context parallelism only with FSDP2."""
    return config.zero_stage > 0 or config.model_parallel_size > 1


def _kind(winner: Winner) -> str:
    if _sharded(winner.config):
        return "FSDP"
    return "MULTI_GPU" if winner.on_gpus else "MULTI_CPU"


def _fsdp(winner: Winner) -> dict[str, Any]:
    config = winner.config
    settings: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": config.zero_stage == 3 and config.reshard_after_forward,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": config.activation_checkpointing != "none",
        "fsdp_offload_params": config.offload_param == "cpu",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if (layer := DECODER_LAYERS.get(winner.shape.family if winner.shape else "")) is not None:
        settings["fsdp_transformer_layer_cls_to_wrap"] = layer
    return settings


def _has_mesh(winner: Winner) -> bool:
    return winner.config.model_parallel_size > 1 or winner.shard_size < winner.zero_ranks


def _mesh(winner: Winner) -> dict[str, Any]:
    context = winner.config.context_parallel_size
    copies = replicas(winner, FSDP.format)
    return {
        "parallelism_config_dp_replicate_size": copies,
        "parallelism_config_dp_shard_size": winner.data_parallel_size // copies,
        "parallelism_config_tp_size": winner.config.tensor_parallel_size,
        "parallelism_config_cp_size": context,
    }


def _fsdp_notes(winner: Winner) -> list[str]:
    config = winner.config
    notes = peft.peft_notes(winner) + fsdp2_notes(config, "fsdp_reshard_after_forward: false")
    if _sharded(config):
        plugin = "give a FullyShardedDataParallelPlugin with a MixedPrecisionPolicy of this reduce_dtype"
        notes += reduction_note(config, "Accelerate", plugin)
    notes += _machine_notes(winner)
    if config.zero_stage == 0 and _sharded(config):
        notes.append("zero_stage=0: Accelerate composes other dimensions with FSDP2 alone, so that states are sharded")
    notes.append(
        f"micro_batch_size={config.micro_batch_size}: give the DataLoader this batch_size, and "
        f"Accelerator(gradient_accumulation_steps={winner.gradient_accumulation_steps})"
    )
    notes += unplaced_notes(winner, "it belongs to the optimizer that your program makes", "lr", "weight_decay", "optimizer")
    notes += unplaced_notes(winner, "call accelerator.clip_grad_norm_ with it", "clip")
    if config.activation_checkpointing == "selective":
        notes.append("activation_checkpointing=selective: Accelerate knows full alone, which is switched on")
    if config.precision == "fp8":
        notes.append("precision=fp8: add an fp8_config whose backend is AO (torchao) or TE (Transformer Engine)")
    if config.precision == "fp64":
        notes.append("precision=fp64: cast the model to double before it is handed over")
    if _sharded(config) and not winner.on_gpus:
        notes.append("measured on CPUs: Accelerate runs FSDP on accelerators alone")
    if _sharded(config) and (winner.shape is None or winner.shape.family not in DECODER_LAYERS):
        notes.append("fsdp_transformer_layer_cls_to_wrap is left out: name your model's layer class, or set _no_split_modules")
    return notes + (FSDP if _sharded(config) else DDP).unexpressed(config)
