"""Axolotl's YAML: read, and what its schemas refuse (checked with 067b021c)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autotune.frameworks.framework import Check, Framework, LintCase, Option, Settings
from autotune.frameworks.imported import Imported, flat, switch_of
from autotune.frameworks.trainer import read_trainer
from autotune.frameworks.trainer_checks import (
    RULES,
    STEPS,
    exclude,
    fields_of,
    is_set,
    needs,
    one_of,
    refuse_method,
    refused,
    sizes_of,
    unknown_fields,
)
from autotune.frameworks.trainer_table import TrainerTable, TrainingProgram, memory_arguments
from search_spaces.errors import Effect, Finding
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

VERSION, SHARD, REPLICATE = "fsdp_version", "dp_shard_size", "dp_replicate_size"
ATTENTION_FLAGS: Mapping[str, str] = {
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "xformers_attention": "xformers",
    "flex_attention": "flex_attention", "eager_attention": "eager", "sage_attention": "sage",
}  # fmt: skip
"""Deprecated switch -> the word of attn_implementation."""
OPTIONS = (
    Option("base_model", field="model"),
    Option("micro_batch_size", "micro_batch_size"),
    Option(STEPS, field=STEPS),
    Option("sequence_len", field="sequence_length"),
    Option("gradient_checkpointing", "activation_checkpointing", words={"none": False, "full": True}),
    Option("activation_offloading", "offload_activations"),
    Option("fp8", field="fp8"), Option("bf16", field="bf16"), Option("bfloat16", field="bf16"),
    Option("fp16", field="fp16"), Option("float16", field="fp16"),
    Option("tensor_parallel_size", "tensor_parallel_size"),
    Option("context_parallel_size", "context_parallel_size"), Option("sequence_parallel_degree", "context_parallel_size"),
    Option(SHARD, field="dp_shard"), Option(REPLICATE, field="dp_replicate"), Option(VERSION, field="fsdp_version"),
    Option("fsdp", field="fsdp"), Option("fsdp_config", field="fsdp_config"), Option("deepspeed", field="deepspeed"),
    Option("adapter", field="adapter"), Option("lora_r", "lora_rank"),
    Option("lora_target_modules", "lora_targets", changes=False), Option("lora_target_linear", field="lora_all_linear"),
    Option("load_in_4bit", field="load_in_4bit"), Option("load_in_8bit", field="load_in_8bit"),
    Option("sample_packing", "pack_sequences"), Option("attn_implementation", "attention_backend", changes=False),
    Option("optimizer", "optimizer", changes=False), Option("torch_compile", "compile_blocks"),
    Option("liger_rms_norm", "fused_kernels", changes=False),
    Option("liger_fused_linear_cross_entropy", "fused_kernels", changes=False),
    Option("learning_rate", field="lr"), Option("weight_decay", field="weight_decay"), Option("max_grad_norm", field="clip"),
)  # fmt: skip
PROGRAM = TrainingProgram(
    quantised_words={"double_quantised": "true"},
    title="Axolotl 067b021c", options=OPTIONS,
    noted=("peft_use_dora", "lora_modules_to_save", "lora_target_parameters", "auto_find_batch_size", "batch_flattening",
           "gptq", "plugins"),
    methods=("unfrozen_parameters", "layer_offloading", "expert_parallel_size", "quantize_moe_experts", "qat", "relora"),
    loads_in_precision=True,
    defaults={
        "micro_batch_size": 1, STEPS: 1, "sequence_len": 512, "gradient_checkpointing": False, "bf16": "auto", "lora_r": 8,
        "optimizer": "adamw_torch_fused",
    },
)  # fmt: skip


def from_axolotl(content: Mapping[str, Any], source: str) -> Imported:
    """Read the file.

    Raises:
        RequestError: a value is not valid.
    """
    settings = dict(flat(content))
    flag = next((flag for flag in ATTENTION_FLAGS if switch_of(settings.get(flag))), "attn_implementation")
    if flag in ATTENTION_FLAGS:
        settings.setdefault("attn_implementation", ATTENTION_FLAGS[flag])
    batch, micro = settings.get("batch_size"), settings.get("micro_batch_size")
    if isinstance(batch, int) and isinstance(micro, int) and micro > 0 and STEPS not in settings:
        settings[STEPS] = max(batch // micro, 1)
    table = TrainerTable(settings, source, PROGRAM)
    for key in ("rl", "reward_model", "process_reward_model"):
        if settings.get(key):
            refuse_method(table, key, str(settings[key]) if key == "rl" else "reward")
    plugins = settings.get("plugins")
    if isinstance(plugins, list):
        unread = [name for name in plugins if not str(name).endswith("LigerPlugin")]
        table.settings["plugins"] = unread
    if "learning_rate" not in settings:
        table.notes.append("learning_rate: not stated, which Axolotl refuses")
    if not any(key.startswith(("datasets", "pretraining_dataset")) for key in settings):
        table.notes.append("datasets: not stated, which Axolotl refuses")
    imported = read_trainer(table)
    degrees = [settings.get(key) or 1 for key in (SHARD, REPLICATE, "tensor_parallel_size", "context_parallel_size")]
    ranks = imported.ranks
    if ranks is None and settings.get(SHARD) and all(isinstance(degree, int) for degree in degrees):
        ranks = degrees[0] * degrees[1] * degrees[2] * degrees[3]
    shards = settings.get(SHARD)
    knobs = (
        {"hsdp_shard_size": shards} if isinstance(shards, int) and shards > 1 and imported.knobs.get("zero_stage") == 3 else {}
    )
    keys = {**imported.keys, "attention_backend": "attn_implementation" if content.get("attn_implementation") else flag}
    return replace(imported, settings=dict(flat(content)), ranks=ranks, knobs={**imported.knobs, **knobs}, keys=keys)


def _version(case: LintCase) -> str:
    """FSDP's version; empty: the file has no fsdp_config."""
    version = case.get(VERSION) or case.get(f"fsdp_config.{VERSION}") or case.get("fsdp_config.version") or 1
    return str(version) if is_set(case, "fsdp_config") else ""


def _product(case: LintCase) -> str | None:
    """Why the degrees do not make the ranks; without dp_replicate_size the groups of dp_shard_size are as many as there fit."""
    product, ranks = case.imported.ranks, case.ranks
    if not is_set(case, SHARD) or product is None or ranks is None:
        return None
    if ranks % product if not is_set(case, REPLICATE) else ranks != product:
        return f"the degrees multiply to {product} ranks, and there are {ranks}"
    return None


def _implementation(case: LintCase) -> str:
    flags = (word for flag, word in ATTENTION_FLAGS.items() if case.on(flag))
    return str(case.get("attn_implementation") or next(flags, ""))


REMOVED = (
    "max_packed_sequence_len", "rope_scaling", "s2_attention", "flash_attn_rms_norm", "dpo_norm_loss", "rpo_alpha",
    "dpo_use_logits_to_keep", "dpo_generate_during_eval", *(f"unsloth_{name}" for name in (
        "cross_entropy_loss", "lora_mlp", "lora_qkv", "lora_o", "rms_norm", "rope",
    )),
)  # fmt: skip
"""Settings of earlier versions."""


def _removed(key: str) -> Check:
    return refused(
        f"removed-{key.replace('_', '-')}", key, "Axolotl has it no more", lambda case: is_set(case, key), {key: None}
    )


def _needs_steps(name: str) -> Check:
    strategy, steps = f"{name}_strategy", f"{name}_steps"
    return refused(f"{name}-strategy", steps, lambda case: f"{strategy}={case.get(strategy)} takes no {steps}",
                   lambda case: case.get(steps) and case.get(strategy) not in (None, "steps"), {strategy: "steps"})  # fmt: skip


EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
ADAPTERS = ("lora", "qlora", "llama-adapter")
SHORT = {"flash": "flash_attention_2", "flex": "flex_attention", "sdp": "sdpa"}
CHECKS = (
    refused("batch-fields", "micro_batch_size", f"at least two of micro_batch_size, {STEPS} and batch_size must be stated",
            lambda case: sum(is_set(case, key) for key in ("micro_batch_size", STEPS, "batch_size")) < 2,
            lambda case: {key: 1 for key in ("micro_batch_size", STEPS) if not is_set(case, key)}),
    exclude(STEPS, "batch_size"), exclude("warmup_steps", "warmup_ratio"), exclude("saves_per_epoch", "save_steps"),
    exclude("evals_per_epoch", "eval_steps"), exclude("deepspeed", "fsdp"), _needs_steps("save"), _needs_steps("eval"),
    exclude("test_datasets", "val_set_size"), exclude("pretraining_dataset", "val_set_size"),
    exclude("max_memory", "gpu_memory_limit"), *(exclude("attn_implementation", flag) for flag in ATTENTION_FLAGS),
    needs("relora", "jagged_restart_steps"), needs("deepcompile", "deepspeed"), needs("streaming", "max_steps"),
    needs("early_stopping_patience", "save_steps"), needs("peft_layers_pattern", "peft_layers_to_transform"),
    *map(_removed, REMOVED),
    one_of("fsdp_config.auto_wrap_policy", ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP")),
    one_of("fsdp_config.state_dict_type", ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")),
    refused("adapter-word", "adapter", lambda case: f"{case.get('adapter')!r} is none of Axolotl's, and no plug-in has it",
            lambda case: case.get("adapter", "lora") not in (*ADAPTERS, "", False) and not case.get("plugins"), {},
            f"use one of {', '.join(ADAPTERS)}"),
    refused("attention-name", "attn_implementation", lambda case: f"{case.get('attn_implementation')!r} is not known",
            lambda case: not {str(case.get("attn_implementation", "sdpa"))} & {*ATTENTION_FLAGS.values(), *SHORT, "fp8",
            "flash_attention_3"} and "/" not in str(case.get("attn_implementation")), {}, "use flash_attention_2"),
    refused("tokens-list", "tokens", "it is a list of tokens; those with a role belong to special_tokens",
            lambda case: any(key.startswith("tokens.") for key in case.imported.settings), {}, "rename it"),
    refused("whole-warmup-steps", "warmup_steps", "it is a whole number; warmup_ratio is a part of all steps",
            lambda case: isinstance(case.get("warmup_steps"), float) and case.get("warmup_steps") % 1 != 0,
            lambda case: {"warmup_steps": None, "warmup_ratio": case.get("warmup_steps")}),
    refused("best-without-metric", "save_strategy", "the best checkpoint needs metric_for_best_model",
            lambda case: case.get("save_strategy") == "best" and not is_set(case, "metric_for_best_model"),
            {"metric_for_best_model": "eval_loss"}),
    refused("evaluation-strategy", "eval_strategy", "evals_per_epoch needs the strategy steps",
            lambda case: is_set(case, "evals_per_epoch") and case.get("eval_strategy", "steps") != "steps",
            {"eval_strategy": "steps"}),
    refused("packing-preferences", "sample_packing", "it does not work with rl",
            lambda case: case.on("sample_packing") and is_set(case, "rl"), {"sample_packing": False}),
    refused("bits-without-adapter", "load_in_4bit", "weights of 4 or 8 bits need an adapter",
            lambda case: not is_set(case, "adapter") and (case.on("load_in_4bit") or case.on("load_in_8bit")),
            {"load_in_4bit": False, "load_in_8bit": False}),
    refused("qlora-in-8-bits", "load_in_8bit", "qlora has weights of 4 bits",
            lambda case: case.get("adapter") == "qlora" and case.on("load_in_8bit"),
            {"load_in_8bit": False, "load_in_4bit": True}),
    refused("qlora-without-bits", "adapter", "qlora needs load_in_4bit", lambda case: case.get("adapter") == "qlora"
            and not case.on("load_in_4bit") and not case.on("load_in_8bit"), {"load_in_4bit": True}),
    refused("offloading-without-checkpointing", "activation_offloading", "it needs gradient_checkpointing",
            lambda case: is_set(case, "activation_offloading") and not is_set(case, "gradient_checkpointing"),
            {"gradient_checkpointing": True}),
    refused("fsdp2-8-bit-optimizer", "optimizer", lambda case: f"FSDP2 does not work with {case.get('optimizer')}",
            lambda case: _version(case) == "2" and case.get("optimizer") in EIGHT_BITS[:2], {"optimizer": "adamw_torch_8bit"}),
    refused("fsdp-offload-8-bit-optimizer", "optimizer",
            lambda case: f"FSDP with offload_params does not work with {case.get('optimizer')}",
            lambda case: _version(case) == "1" and "8bit" in str(case.get("optimizer"))
            and any(case.on(f"fsdp_config.{name}offload_params") for name in ("", "fsdp_")),
            {"optimizer": "adamw_torch_fused"}),
    refused("muon-sharding", "optimizer", "muon works with FSDP2 or without sharding", lambda case: _version(case) != "2"
            and case.get("optimizer") == "muon" and (is_set(case, "deepspeed") or _version(case)),
            {"optimizer": "adamw_torch_fused"}),
    refused("degrees-product", SHARD, _product, bool, {SHARD: None}),
    refused("shards-without-fsdp", SHARD, "it needs fsdp_config", lambda case: (case.ranks or 2) > 1
            and case.get(SHARD, 1) != 1 and not _version(case),
            {VERSION: 2, "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
    refused("context-attention", "context_parallel_size", "context parallelism needs flash attention",
            lambda case: case.config.context_parallel_size > 1 and "flash" not in _implementation(case),
            {"attn_implementation": "flash_attention_2"}),
    refused("context-packing", "micro_batch_size", "context parallelism with sample_packing takes one sample",
            lambda case: case.config.context_parallel_size > 1 and case.on("sample_packing")
            and case.config.micro_batch_size > 1, {"micro_batch_size": 1}),
    refused("attention-word", "attn_implementation", lambda case: f"{case.get('attn_implementation')} is a short form",
            lambda case: str(case.get("attn_implementation")) in SHORT,
            lambda case: {"attn_implementation": SHORT[str(case.get("attn_implementation"))]}),
)  # fmt: skip
"""What Axolotl's schemas raise for, that users meet [src/axolotl/utils/schemas/validation.py and peft.py]."""


def _unknown_fields(case: LintCase) -> Iterator[Finding]:
    """Axolotl leaves settings unread that neither it nor its plug-ins have; of plug-ins of others nothing is known."""
    plugins = case.get("plugins") or []
    if isinstance(plugins, list) and all(str(name).startswith("axolotl.") for name in plugins):
        yield from unknown_fields(case, fields_of("axolotl"), Effect.IGNORED)


def _rewrite(case: LintCase, knob: str, value: Value) -> Settings | None:
    """FSDP2 divides everything; other stages are those of a DeepSpeed file."""
    if knob == "zero_stage":
        shards = value == 3 and case.config.zero_stage == 0 and not _version(case) and not is_set(case, "deepspeed")
        return {VERSION: 2, "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} if shards else {}
    if knob == "tensor_parallel_size" and _version(case) != "2":
        return {}
    return None


def _sizes(case: LintCase, config: TrialConfig, batch: int) -> Settings:
    settings = dict(sizes_of(case, config, batch))
    if is_set(case, SHARD):
        replicas = case.replicas or 1
        settings[SHARD] = config.hsdp_shard_size or replicas
        if is_set(case, REPLICATE):
            settings[REPLICATE] = max(replicas // int(settings[SHARD]), 1)
    return settings


AXOLOTL = Framework(
    name="axolotl", title="Axolotl", checked="067b021c", options=OPTIONS, read=from_axolotl, checks=CHECKS, rules=RULES,
    rewrite=_rewrite, sizes=_sizes, undeclared_findings=_unknown_fields,
    memory_arguments=lambda settings: memory_arguments(settings, PROGRAM),
)  # fmt: skip
