"""Reads Megatron-LM's arguments, and the settings of Megatron-Bridge, which have the same meanings, as knobs."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.best_config import Stated
from autotune.frameworks.framework import BATCH, Option
from autotune.frameworks.imported import FlatTable, Imported, model_named, switch_of
from autotune.frameworks.shell import ENVIRONMENT, LAUNCHER
from search_spaces.errors import ModelFormatError
from search_spaces.kernels import ENGINE_ATTENTION
from search_spaces.knobs.computation import MODULES, MXFP8, TENSORWISE
from search_spaces.models.model import Latent, ModelSpec, Norm, Position
from search_spaces.trial_config import TrialConfig

LM, BRIDGE = "megatron", "megatron-bridge"


@dataclass(frozen=True, slots=True)
class Argument:
    """A setting of both frameworks: one row of their table."""

    name: str
    """As Megatron-Bridge spells it."""
    knob: str = ""
    """As `Option.knob`."""
    table: str = "model"
    """Its table in Megatron-Bridge's ConfigContainer."""
    option: str = ""
    """Megatron-LM's option; empty: the name, with dashes."""
    guarded: bool = True
    """Whether a misspelling is reported: it changes a layout without a word."""
    of_base: bool = False
    """Whether a file of Megatron-Bridge that does not state it leaves it to the recipe that it begins with."""
    changes: bool = True
    """As `Option.changes`."""


ARGUMENTS = (
    Argument("tensor_model_parallel_size", "tensor_parallel_size", of_base=True),
    Argument("pipeline_model_parallel_size", "pipeline_parallel_size", of_base=True),
    Argument("context_parallel_size", "context_parallel_size"),
    Argument("expert_model_parallel_size", "expert_parallel_size"),
    Argument("micro_batch_size", "micro_batch_size", "train", of_base=True),
    Argument("global_batch_size", BATCH, "train"),
    Argument("sequence_parallel", "sequence_parallel"),
    Argument("recompute_granularity", "activation_checkpointing", of_base=True),
    Argument("use_distributed_optimizer", "zero_stage", "ddp"),
    Argument("optimizer_cpu_offload", "offload_optimizer", "optimizer"),
    Argument("grad_reduce_in_fp32", "accumulation_dtype", "ddp", guarded=False, of_base=True, changes=False),
    Argument("bucket_size", "reduce_bucket_size", "ddp", "ddp-bucket-size", guarded=False, changes=False),
    Argument("overlap_grad_reduce", "overlap_comm", "ddp", changes=False),
    Argument("overlap_param_gather", "overlap_param_gather", "ddp", changes=False),
    Argument("optimizer_offload_fraction", "offload_ratio", "optimizer", guarded=False, changes=False),
    Argument("moe_shared_expert_overlap", "shared_expert_overlap", changes=False),
    Argument("cp_comm_type", "context_parallel_method", guarded=False, changes=False),
    Argument("attention_backend", "attention_backend", guarded=False, changes=False),
    Argument("use_tp_pp_dp_mapping", "rank_order", "dist", guarded=False, changes=False),
    Argument("expert_tensor_parallel_size", "expert_tensor_parallel_size", changes=False),
    Argument("vocab_size", "vocab_size", changes=False),
    Argument("mtp_num_layers", "mtp_layers"),
    Argument("mtp_loss_scaling_factor", "mtp_loss_weight", guarded=False),
    Argument("num_moe_experts", option="num-experts"),
    Argument("microbatch_group_size_per_vp_stage", option="microbatch-group-size-per-virtual-pipeline-stage"),
    Argument("num_layers_in_first_pipeline_stage", option="decoder-first-pipeline-num-layers"),
    Argument("num_layers_in_last_pipeline_stage", option="decoder-last-pipeline-num-layers"),
    *map(Argument, (
        "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
        "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "seq_length", "max_position_embeddings",
        "recompute_method", "recompute_num_layers", "recompute_modules", "moe_router_topk", "moe_token_dispatcher_type",
        "moe_flex_dispatcher_backend", "num_query_groups", "group_query_attention", "num_layers",
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
        "qk_pos_emb_head_dim", "v_head_dim", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq",
        "moe_router_num_groups", "moe_router_group_topk", "swiglu", "normalization", "position_embedding_type",
        "untie_embeddings_and_output_weights", "padded_vocab_size", "make_vocab_size_divisible_by",
    )),
    *(Argument(name, table="ddp") for name in ("use_megatron_fsdp", "data_parallel_sharding_strategy")),
    Argument("num_distributed_optimizer_instances", table="ddp", guarded=False),
    Argument("use_precision_aware_optimizer", table="optimizer"),
    *(Argument(name, table="optimizer", guarded=False) for name in (
        "lr", "weight_decay", "clip_grad", "optimizer",
    )),
    *(Argument(name, table="train", guarded=False) for name in ("train_samples", "train_iters")),
    Argument("use_torch_fsdp2", table="dist"),
    Argument("ckpt_format", table="checkpoint"),
    Argument("tp_comm_overlap", table="comm_overlap"),
    Argument("overlap_p2p_comm", table="comm_overlap", guarded=False),
    Argument("overlap_moe_expert_parallel_comm", table="comm_overlap", guarded=False),
)  # fmt: skip
"""Settings that state knobs or are checked. What else describes the model is read by its name, in the table `model`."""
BY_NAME = {argument.name: argument for argument in ARGUMENTS}
REMOVED: Mapping[str, str] = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
}
"""Options of Megatron-LM before core -> those of today."""
OF_FORKS: Mapping[str, tuple[str, ...]] = {
    "context_parallel_size": ("--ds-sequence-parallel-size",),
    "expert_model_parallel_size": ("--moe-expert-parallel-size",),
    "num_query_groups": ("--num-key-value-heads",),
    "moe_router_topk": ("--topk",),
    "padded_vocab_size": ("--pad-vocab-size-to",),
    "recompute_num_layers": ("--checkpoint-num-layers", "--activations-checkpoint-num-layers"),
    "optimizer_cpu_offload": ("--cpu-optimizer",),
}
"""Setting -> how Megatron-DeepSpeed and versions before core spell it."""
FULLY_RECOMPUTED = ("--checkpoint-activations", "--activations-checkpoint-method")
"""Options of Megatron-DeepSpeed and of versions before core that recompute whole layers."""
OTHER_LAYERS = (
    "hybrid_attention_ratio", "hybrid_mlp_ratio", "hybrid_override_pattern", "hybrid_layer_pattern", "is_hybrid_model",
    "encoder_num_layers", "encoder_seq_length", "retro_num_layers",
)  # fmt: skip
"""Settings of models with layers of Mamba, or with an encoder."""
MOST_LAYERS = 100_000
"""Layers of a model, and letters of a layout: a few characters could stand for more than fit into memory."""
SHARDING = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO stage -> Megatron-FSDP's sharding strategy."""
DESCRIBING = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "num_query_groups",
    "group_query_attention", "swiglu", "gated_linear_unit", "normalization", "position_embedding_type", "vocab_size",
    "use_rotary_position_embeddings", "untie_embeddings_and_output_weights", "max_position_embeddings", "num_moe_experts",
    "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq", "multi_latent_attention",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
)  # fmt: skip
"""Settings that only describe the model."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one of the two frameworks spells a setting."""

    format: str

    def key(self, name: str) -> str:
        """The setting as it is written."""
        argument = BY_NAME.get(name, Argument(name))
        if self.format == LM:
            return "--" + (argument.option or name.replace("_", "-"))
        return f"{argument.table}.{name}"


def options_of(dialect: Dialect) -> tuple[Option, ...]:
    """The table as one of the frameworks spells it."""
    return tuple(Option(dialect.key(row.name), row.knob, changes=row.changes) for row in ARGUMENTS)


KEPT: Mapping[str, str] = {
    **{name: name for name in (
        "transformer_impl", "attention_backend", "attention_dropout", "hidden_dropout", "qk_layernorm", "persist_layer_norm",
        "gradient_accumulation_fusion", "wgrad_deferral_limit", "recompute_modules", "recompute_method", "fp8_recipe",
        "recompute_num_layers", "bias_gelu_fusion", "fp8_param_gather",
    )},
    "deterministic": "deterministic_mode", "bias_linear": "add_bias_linear", "permute_fusion": "moe_permute_fusion",
    "defer_embedding_wgrad": "defer_embedding_wgrad_compute", "dispatcher": "moe_token_dispatcher_type",
    "moe_comm_overlap": "overlap_moe_expert_parallel_comm",
    "create_attention_mask": "create_attention_mask_in_dataloader", "grouped_gemm": "moe_grouped_gemm",
    "cross_entropy_fusion": "cross_entropy_fusion_impl",
    "activation_offload": "fine_grained_activation_offloading",
    "dist_optimizer_instances": "num_distributed_optimizer_instances",
}  # fmt: skip
"""Field of `Megatron` -> the setting that states it; Megatron-LM turns some of them off, by --no- or --disable-."""


def memory_arguments(settings: Mapping[str, Any], dialect: Dialect) -> dict[str, str]:
    """The words of `Megatron` that a file states, and defaults of its framework."""
    bridge = dialect.format == BRIDGE
    words = {"attention_dropout": "0.1", "hidden_dropout": "0.1", "wgrad_deferral_limit": "0", "bias_linear": "true"}
    if bridge:  # as most of its recipes have it
        words |= {"attention_dropout": "0", "hidden_dropout": "0", "bias_linear": "false", "cross_entropy_fusion": "te",
                  "create_attention_mask": "false",
                  "dispatcher": "alltoall", "grouped_gemm": "true", "permute_fusion": "true"}  # fmt: skip
    for name, setting in KEPT.items():
        option = (name if name == "bias_linear" else setting).replace("_", "-")
        value = settings.get(dialect.key(setting))
        if value is not None:
            words[name] = " ".join(names_in(value)) if name == "recompute_modules" else str(value)
        elif switch_of(settings.get(f"--no-{option}")) or switch_of(settings.get(f"--disable-{option}")):
            words[name] = "false"
    words["cublas_workspace"] = str(settings.get(f"{ENVIRONMENT}CUBLAS_WORKSPACE_CONFIG", ""))
    fused = switch_of(settings.get("model.cross_entropy_loss_fusion" if bridge else "--cross-entropy-loss-fusion", bridge))
    words["cross_entropy_fusion"] = words.get("cross_entropy_fusion", "native") if fused else "none"
    return words


def from_megatron(content: Mapping[str, Any], source: str, dialect: Dialect) -> Imported:
    """Read Megatron-LM's arguments (option -> value, as `autotune.frameworks.shell` returns them) or Megatron-Bridge's table.

    Raises:
        RequestError: they are of a removed version, a value is not valid, or it is outside its knob's domain.
    """
    for key, now in REMOVED.items():
        if key in content:
            raise RequestError(key, f"{source} is for a Megatron-LM before Megatron-core", f"use {now}")
    return _MegatronReading(content, source, dialect).imported()


class _MegatronReading:
    """One configuration while it is read."""

    _ASSUMED_VOCABULARY = 128_256

    def __init__(self, content: Mapping[str, Any], source: str, dialect: Dialect) -> None:
        self.table, self.dialect = FlatTable(content, source), dialect

    def key(self, name: str) -> str:
        """The setting as the file spells it."""
        spellings = (key for key in OF_FORKS.get(name, ()) if key in self.table.settings)
        return next(spellings, self.dialect.key(name))

    def whole(self, name: str) -> int | None:
        return self.table.whole(self.key(name))

    def switch(self, name: str, default: bool = False) -> bool:
        value = self.table.switch(self.key(name))
        return default if value is None else value

    def word(self, name: str) -> str:
        value = self.table.take(self.key(name))
        return "" if value is None else str(value)

    def degree(self, name: str, knob: str) -> int:
        return self.table.size(self.key(name), knob)

    def imported(self) -> Imported:
        table, key = self.table, self.key
        bridge = self.dialect.format == BRIDGE
        tensor = self.degree("tensor_model_parallel_size", "tensor_parallel_size")
        pipeline = self.degree("pipeline_model_parallel_size", "pipeline_parallel_size")
        self.degree("context_parallel_size", "context_parallel_size")
        self.degree("expert_model_parallel_size", "expert_parallel_size")
        expert_tensor = self.whole("expert_tensor_parallel_size")
        if expert_tensor and expert_tensor != tensor:
            table.set("expert_tensor_parallel_size", expert_tensor, key("expert_tensor_parallel_size"))
        table.set("micro_batch_size", self.whole("micro_batch_size"), key("micro_batch_size"))
        if modules := self.whole("mtp_num_layers"):
            table.set("mtp_layers", modules, key("mtp_num_layers"))
            weight = table.quantity(key("mtp_loss_scaling_factor"))
            table.set("mtp_loss_weight", 0.1 if weight is None else weight, key("mtp_loss_scaling_factor"))
        table.assumed |= {
            argument.knob: getattr(TrialConfig(), argument.knob)
            for argument in ARGUMENTS
            if argument.of_base and (bridge or argument.name == "micro_batch_size") and key(argument.name) not in table.settings
        }
        if self.switch("sequence_parallel") and tensor > 1:
            table.set("sequence_parallel", True, key("sequence_parallel"))
        if self.switch("moe_shared_expert_overlap"):
            table.set("shared_expert_overlap", True, key("moe_shared_expert_overlap"))
        lengths = [table.whole(f"dataset.{name}") for name in ("seq_length", "sequence_length")] if bridge else []
        model, tokens = self._model(), self.whole("seq_length") or next(filter(None, lengths), None)
        lengths_of = (key("seq_length"), "dataset.seq_length", "dataset.sequence_length")
        if tokens is not None:
            table.keys["sequence_length"] = next(key for key in lengths_of if table.settings.get(key) is not None)
        if pipeline > 1:
            self._pipeline(model, pipeline)
        self._states()
        self._precision(bridge)
        self._recomputed(model, pipeline)
        if self.word("cp_comm_type") == "a2a" or table.keys.get("context_parallel_size") == "--ds-sequence-parallel-size":
            table.set("context_parallel_method", "ulysses", key("cp_comm_type"))
        kernels = {**{word: kernel for kernel, word in ENGINE_ATTENTION.items()}, "auto": "best", "local": "math"}
        if (kernel := kernels.get(self.word("attention_backend").rsplit(".", 1)[-1])) is not None:
            table.set("attention_backend", kernel, key("attention_backend"))
        if self.switch("use_tp_pp_dp_mapping"):
            table.set("rank_order", "tp-cp-pp-dp", key("use_tp_pp_dp_mapping"))
        hyperparameters = Stated(
            lr=table.quantity(key("lr")) or None, weight_decay=table.quantity(key("weight_decay")),
            clip=table.quantity(key("clip_grad")), optimizer={"adam": "adamw", "sgd": "sgd"}.get(self.word("optimizer")),
        )  # fmt: skip
        ranks = _launched(table)
        table.drop_tables(
            LAUNCHER, "env.", "dataset.", "tokenizer.", "logger.", "checkpoint.", "scheduler.", "rng.", "profiling."
        )
        return table.imported(
            model=model, ranks=ranks, global_batch_size=self.whole("global_batch_size"),
            sequence_length=tokens, hyperparameters=hyperparameters,
        )  # fmt: skip

    def _pipeline(self, model: ModelSpec | None, ranks: int) -> None:
        key = self.key
        stage_layers, layout = self.whole("num_layers_per_virtual_pipeline_stage"), key("pipeline_model_parallel_layout")
        parts = layout_stages(self.table.take(layout), layout)
        first, last = (self.whole(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
        embedding, loss = (self.switch(f"account_for_{part}_in_pipeline_split") for part in ("embedding", "loss"))
        if "embedding" in self.word("pp_partition_method"):  # of Megatron-DeepSpeed, as in `type:transformer|embedding`
            embedding = loss = True
        layers = model.num_layers + embedding + loss if model else 0
        counts = {
            "virtual_pipeline_model_parallel_size": self.whole("virtual_pipeline_model_parallel_size"),
            "num_virtual_stages_per_pipeline_rank": self.whole("num_virtual_stages_per_pipeline_rank"),
            "num_layers_per_virtual_pipeline_stage": max(layers // ranks // stage_layers, 1)
            if stage_layers and layers
            else None,
            "pipeline_model_parallel_layout": max(len(parts) // ranks, 1) if parts else None,
        }
        name, stages = next(((name, count) for name, count in counts.items() if count), ("", 1))
        if name:
            self.table.set("virtual_stages", stages, key(name))
        self.table.set("pipeline_schedule", "interleaved_1f1b" if stages > 1 else "1f1b")
        if parts:
            name, per_stage = "pipeline_model_parallel_layout", [part.count("t") for part in parts]
        elif model and ranks * stages > model.num_layers:
            return  # which a rule refuses
        elif model and (first or last):
            name = "num_layers_in_first_pipeline_stage" if first else "num_layers_in_last_pipeline_stage"
            ends = [count for count in (first, last) if count]
            between = (model.num_layers - sum(ends)) // max(ranks - len(ends), 1)
            per_rank = [first or between, *[between] * (ranks - 2), last or between]
            per_stage = [count // stages for _ in range(stages) for count in per_rank]
        elif model and (embedding or loss):
            name = f"account_for_{'embedding' if embedding else 'loss'}_in_pipeline_split"
            per_stage = [layers // (ranks * stages)] * (ranks * stages)
            per_stage[0], per_stage[-1] = per_stage[0] - embedding, per_stage[-1] - loss
        else:
            self.table.set("pipeline_split", "even")
            return
        if all(count > 0 for count in per_stage) and (model is None or sum(per_stage) == model.num_layers):
            self.table.set("pipeline_layout", "-".join(map(str, per_stage)), key(name))
        else:
            stages_text = ", ".join(map(str, per_stage))
            self.table.notes.append(f"{key(name)}: stages of {stages_text} layers are predicted as equal ones")

    def _states(self) -> None:
        table, key = self.table, self.key
        bridge = self.dialect.format == BRIDGE
        stage = 1 if self.switch("use_distributed_optimizer", default=bridge) else 0
        strategy = self.table.choice(key("data_parallel_sharding_strategy"), {word: stage for stage, word in SHARDING.items()})
        if self.switch("use_megatron_fsdp"):
            stage = int(strategy) if strategy is not None else 0
        elif self.switch("use_torch_fsdp2"):
            stage = 3
        stage_key = key("use_distributed_optimizer")
        if self.switch("deepspeed"):
            stage_key = "--zero-stage"
            stage = int(table.number(stage_key, default=1))
            if not stage and table.settings.get("--bf16"):
                stage = 1
                table.notes.append(f"{stage_key}=0: DeepSpeed's optimizer for bf16 divides its states as stage 1 does")
            table.drop("--no-pipeline-parallel", "--deepspeed-activation-checkpointing", "--deepspeed_config")
            table.notes.append(
                "--deepspeed: of Megatron-DeepSpeed, whose own parser is not checked; lint the file of --deepspeed_config too"
            )
        table.set("zero_stage", stage, stage_key)
        table.set("overlap_comm", self.switch("overlap_grad_reduce", default=bridge), key("overlap_grad_reduce"))
        if stage and self.switch("overlap_param_gather", default=bridge):
            table.set("overlap_param_gather", True, key("overlap_param_gather"))
        table.knob(key("bucket_size"), "reduce_bucket_size")
        if self.switch("optimizer_cpu_offload") and stage:
            table.set("offload_optimizer", "cpu", key("optimizer_cpu_offload"))
            table.set("offload_ratio", table.quantity(key("optimizer_offload_fraction")), key("optimizer_offload_fraction"))

    def _precision(self, bridge: bool) -> None:
        table, key = self.table, self.key
        mixed = str(table.take("mixed_precision") or "") if bridge else ""
        fp8 = self.word("fp8_format") or self.word("fp8") or ("fp8" if "fp8" in mixed or "mxfp8" in mixed else "")
        half = self.switch("fp16") or mixed.startswith("fp16")
        full = self.switch("bf16") or bridge or fp8
        table.set("precision", "fp8" if fp8 and fp8 != "None" else "fp16" if half else "bf16" if full else "fp32", key("bf16"))
        if table.knobs["precision"] == "fp8":
            recipe, source = self.word("fp8_recipe"), key("fp8_recipe")
            if not recipe and mixed:
                named = {"mxfp8": MXFP8, "subchannel": "blockwise", "nanov2": "blockwise", "delayed": "delayed"}
                recipe = next((value for word, value in named.items() if word in mixed), TENSORWISE)
                source = f"mixed_precision={mixed}: fp8_recipe"
            elif not recipe:
                recipe, source = (TENSORWISE if bridge else "delayed"), f"without {source}, it"
            table.set("fp8_recipe", MXFP8 if recipe == MXFP8 else TENSORWISE, key("fp8_recipe"))
            if recipe in ("delayed", "blockwise"):
                table.notes.append(f"{source} is {recipe}, which no knob means; fp8_recipe=tensorwise is the nearest")
        low = self.switch("grad_reduce_in_bf16") or not self.switch("grad_reduce_in_fp32", default=True)
        self.switch("accumulate_allreduce_grads_in_fp32")
        if low and full:
            table.set("reduce_dtype", "bf16", key("grad_reduce_in_fp32" if bridge else "grad_reduce_in_bf16"))
            table.set("accumulation_dtype", "bf16", key("grad_reduce_in_fp32" if bridge else "grad_reduce_in_bf16"))

    def _recomputed(self, model: ModelSpec | None, ranks: int) -> None:
        table, key = self.table, self.key
        kind, method, layers = (
            self.word("recompute_granularity"),
            self.word("recompute_method"),
            self.whole("recompute_num_layers"),
        )
        if self.switch("recompute_activations"):
            kind = "selective"
        elif [option for option in FULLY_RECOMPUTED if table.take(option)]:
            kind, method = kind or "full", method or str(table.settings.get(FULLY_RECOMPUTED[1], "uniform"))
        if kind and kind not in ("selective", "full", "None"):
            raise RequestError(
                key("recompute_granularity"), f"{kind!r} in {table.source} is not known", "use selective or full"
            )
        modules = names_in(table.take(key("recompute_modules")))
        if kind == "selective" and set(modules) - {"core_attn"}:
            ours = {theirs: name for name, theirs in MODULES.items()}
            if set(modules) <= set(ours):
                table.set("recompute_modules", "+".join(ours[name] for name in modules), key("recompute_modules"))
            else:
                # No knob means all of these: it is not decided.
                table.assumed["activation_checkpointing"] = "selective"
                table.notes.append(f"{key('recompute_modules')}={' '.join(modules)}: no knob means all of it; predictions do")
        elif kind in ("selective", "full"):
            table.set("activation_checkpointing", kind, key("recompute_granularity"))
        if kind == "full" and method == "uniform" and (layers or 1) > 1:
            table.notes.append(f"{key('recompute_num_layers')}={layers}: predictions recompute each layer on its own")
        if kind == "full" and method == "block" and layers and model:
            stages = ranks * int(table.knobs.get("virtual_stages", 1))
            table.set("checkpoint_every_k", max(-(-model.num_layers // stages) // layers, 1), key("recompute_num_layers"))

    def _model(self) -> ModelSpec | None:
        """The model that the arguments describe, else the one that they name."""
        whole, table = self.whole, self.table
        sizes = {name: whole(name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
        if (sizes["num_layers"] or 0) > MOST_LAYERS:
            problem = f"{sizes['num_layers']} in {table.source} is more than {MOST_LAYERS:,} layers"
            raise RequestError(self.dialect.key("num_layers"), problem, "give the layers of the model")
        # Settings that name a model, or that of its tokenizer.
        model_names = [
            str(table.take(key) or "")
            for key in ("recipe", "--tokenizer-model", "model.hf_model_id", "tokenizer.tokenizer_model", "--hf-model-id")
        ]
        other = next((key for name in OTHER_LAYERS if table.settings.get(key := self.key(name))), "")
        experts = self.key("num_moe_experts")
        if len(str(table.settings.get(experts, "")).split()) > 1:  # Megatron-DeepSpeed has one number for each such layer
            other = experts
        if other:
            table.notes.append(f"{other}: the model has other layers than a GPT's, which are not described")
        if other or not all(sizes.values()):
            table.drop(*map(self.key, DESCRIBING))
            return next((model for name in model_names if name and (model := model_named(name)) is not None), None)
        return self._described({name: size for name, size in sizes.items() if size}, model_names)

    def _described(self, sizes: Mapping[str, int], model_names: list[str]) -> ModelSpec | None:
        layers, hidden, heads = sizes["num_layers"], sizes["hidden_size"], sizes["num_attention_heads"]
        whole, bridge = self.whole, self.dialect.format == BRIDGE
        gated = self.switch("swiglu") or self.switch("gated_linear_unit")
        ffn = whole("ffn_hidden_size") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
        deepspeed = "--deepspeed" in self.table.settings
        experts = whole("num_moe_experts") or 0
        experts = 0 if deepspeed and experts == 1 else experts  # its default, a dense model
        grouped = self.switch("group_query_attention") or bridge or "--num-key-value-heads" in self.table.settings
        groups = whole("num_query_groups") if grouped else 1 if self.word("attention_head_type") == "multiquery" else None
        tokenizer = next((model for name in model_names if name and (model := model_named(name)) is not None), None)
        vocabulary = whole("padded_vocab_size") or whole("vocab_size") or (tokenizer.vocab_size if tokenizer else None)
        # Type of tokenizer -> its tokens.
        tokenizers = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}
        vocabulary = vocabulary or tokenizers.get(str(self.table.settings.get("--tokenizer-type")))
        step = whole("make_vocab_size_divisible_by") or 1
        vocabulary = vocabulary and -(-vocabulary // step) * step
        if vocabulary is None:
            self.table.assumed["vocab_size"] = self._ASSUMED_VOCABULARY
        rope = self.word("position_embedding_type") == "rope" or self.switch("use_rotary_position_embeddings")
        tied = not self.switch("untie_embeddings_and_output_weights")
        positions = whole("max_position_embeddings") or 1
        (latent, latent_head), channels = self._latent(), whole("kv_channels")
        try:
            return ModelSpec(
                name="the described model", family="megatron", num_layers=layers, hidden_size=hidden, num_attention_heads=heads,
                num_key_value_heads=heads if groups is None or latent else groups,
                head_dim=latent_head or channels or max(hidden // heads, 1), latent=latent,
                ffn_hidden_size=whole("moe_ffn_hidden_size") or ffn if experts else ffn,
                vocab_size=vocabulary or self._ASSUMED_VOCABULARY,
                sequence_length=positions, tied_embeddings=tied, gated_mlp=gated, activation="silu" if gated else "gelu",
                norm=Norm.RMSNORM if self.word("normalization").lower() == "rmsnorm" else Norm.LAYERNORM,
                position=Position.ROTARY if rope else Position.LEARNED, num_experts=experts,
                experts_per_token=(whole("moe_router_topk") or (1 if deepspeed else 2)) if experts else 0,
                shared_expert_size=whole("moe_shared_expert_intermediate_size") or 0 if experts else 0,
                router_groups=whole("moe_router_num_groups") or 1 if experts else 1,
                router_groups_kept=whole("moe_router_group_topk") or 1 if experts else 1, **self._dense(layers, ffn, experts),
            )  # fmt: skip
        except ModelFormatError as error:
            # Megatron-LM reports sizes that do not belong together itself; the table of rules names them.
            self.table.notes.append(f"the described model is not used: {error}")
            return None

    def _latent(self) -> tuple[Latent | None, int]:
        """Latent attention, and the size of a head's query; defaults as in the two frameworks."""
        bridge = self.dialect.format == BRIDGE
        defaults = {"q_lora_rank": 512 if bridge else 0, "kv_lora_rank": 512 if bridge else 32, "qk_head_dim": 128,
                    "qk_pos_emb_head_dim": 64, "v_head_dim": 128}  # fmt: skip
        sizes = {name: self.whole(name) or default for name, default in defaults.items()}
        if not self.switch("multi_latent_attention"):
            return None, 0
        latent = Latent(
            key_value_rank=sizes["kv_lora_rank"], rotated=sizes["qk_pos_emb_head_dim"], value_size=sizes["v_head_dim"],
            query_rank=sizes["q_lora_rank"],
        )  # fmt: skip
        return latent, sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"]

    def _dense(self, layers: int, ffn: int, experts: int) -> dict[str, Any]:
        key = self.dialect.key("moe_layer_freq")
        value = self.table.take(key)
        if not experts or value is None:
            return {}
        pattern = layer_pattern(value, layers)
        if pattern is None or len(pattern) != layers:  # a wrong length is refused by a check
            self.table.notes.append(f"{key}={value}: not read; predictions have experts in every layer")
            return {}
        dense = tuple(not has_experts for has_experts in pattern)
        return {"dense_layers": dense, "dense_ffn_size": ffn} if any(dense) else {}


def names_in(value: Any) -> list[str]:
    """The names of a list, or of a text with blanks or commas between them."""
    return [str(name) for name in value] if isinstance(value, list | tuple) else re.findall(r"\w+", str(value or ""))


def layer_pattern(value: Any, layers: int) -> list[int] | None:
    """The layers that `moe_layer_freq` means, 1 for one with experts: every N-th from the first on, or a list, which may be
    written with + and *; None: it is neither."""
    try:
        root = ast.parse(str(value), mode="eval").body
        if isinstance(root, ast.Constant):
            return [int(index % int(value) == 0) for index in range(layers)]
        return _numbers(root)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None


def _numbers(node: ast.expr) -> list[int]:
    """The numbers of a list that is written with + and *.

    Raises:
        ValueError: it is none, or has more than `MOST_LAYERS`.
    """
    match node:
        case ast.List(elts=elements):
            return [int(ast.literal_eval(element)) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _numbers(left) + _numbers(right)
        case ast.BinOp(left=part, op=ast.Mult(), right=ast.Constant(int() as count)):
            numbers = _numbers(part)
            if len(numbers) * count <= MOST_LAYERS:
                return numbers * count
    raise ValueError("not a list")


def layout_stages(layout: Any, key: str = "pipeline_model_parallel_layout") -> list[str]:
    """The stages of a layout, `Et|(tt|)*30mL` or a list of lists of parts: E is the embedding, t a layer, m a module and L the
    loss.

    Args:
        layout: the setting `key`; None: there are no stages.

    Raises:
        RequestError: a list is not one of lists of parts, or the layout has more than `MOST_LAYERS` letters.
    """
    # Part of a model in a list of stages -> its letter in a layout.
    layer_letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    if isinstance(layout, list):
        try:
            return ["".join(layer_letters[str(part).strip().lower()] for part in stage) for stage in layout]
        except (KeyError, TypeError):
            remedy = f"give each stage a list of {', '.join(layer_letters)}"
            raise RequestError(key, "is not a list of lists of parts", remedy) from None
    text = "" if layout is None else str(layout).replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,6})", r"(.)\*(\d{1,6})"):
        if len(text) + sum(len(group[1]) * int(group[2]) for group in re.finditer(pattern, text)) > MOST_LAYERS:
            raise RequestError(key, f"has more than {MOST_LAYERS:,} letters", "give each layer of the model a letter")
        text = re.sub(pattern, lambda group: group[1] * int(group[2]), text)
    return text.split("|") if text else []


def _launched(table: FlatTable) -> int | None:
    """Ranks that the launcher's options, or the name of a recipe, state."""
    recipe = re.search(r"_(\d+)gpus?(?:_|$)", str(table.settings.get("recipe", "")))
    if recipe is not None:
        return int(recipe[1])
    ranks_per_node, nodes = table.take(f"{LAUNCHER}nproc_per_node"), table.take(f"{LAUNCHER}nnodes")
    nodes = 1 if nodes is None else nodes
    return (
        ranks_per_node * nodes
        if isinstance(ranks_per_node, int) and isinstance(nodes, int) and ranks_per_node > 0 < nodes
        else None
    )
