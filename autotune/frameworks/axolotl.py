"""Axolotl's YAML: read, and what its schemas refuse (checked with 067b021c)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autotune.frameworks.framework import Check, Framework, LintCase, Option, Settings
from autotune.frameworks.imported import Imported, flat
from autotune.frameworks.trainer import TrainerTable, TrainingProgram, read_trainer
from autotune.frameworks.trainer_checks import RULES, STEPS, both_on, fields_of, refuse_method, sizes_of, unknown_fields
from search_spaces.finding import Effect, Finding
from search_spaces.knob import Value

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
    implementation = next((word for flag, word in ATTENTION_FLAGS.items() if settings.get(flag) is True), None)
    if implementation is not None:
        settings.setdefault("attn_implementation", implementation)
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
    if not any(key.startswith(("datasets", "pretraining_dataset")) for key in settings):
        table.notes.append("datasets: not stated, and Axolotl trains on nothing else")
    imported = read_trainer(table)
    degrees = [settings.get(key) or 1 for key in (SHARD, REPLICATE, "tensor_parallel_size", "context_parallel_size")]
    ranks = imported.ranks
    if ranks is None and settings.get(SHARD) and all(isinstance(degree, int) for degree in degrees):
        ranks = degrees[0] * degrees[1] * degrees[2] * degrees[3]
    return replace(imported, settings=dict(flat(content)), ranks=ranks)


def _version(case: LintCase) -> str:
    return str(case.get(VERSION) or case.get(f"fsdp_config.{VERSION}") or case.get("fsdp_config.version") or 1)


def _is_fsdp(case: LintCase) -> bool:
    return any(key.startswith("fsdp_config.") for key in case.imported.settings)


def _optimizer(case: LintCase) -> str:
    return str(case.get("optimizer", ""))


def _implementation(case: LintCase) -> str:
    flags = (word for flag, word in ATTENTION_FLAGS.items() if case.on(flag))
    return str(case.get("attn_implementation") or next(flags, ""))


def _exclusive(name: str, first: str, second: str) -> Check:
    return Check(
        name=name, key=second, effect=Effect.REFUSED, problem=f"{first} and {second} exclude each other", fix={second: None},
        holds=lambda case: all(case.get(key) not in (None, False, 0, "") for key in (first, second)), remedy="leave one out",
    )  # fmt: skip


def _steps_word(name: str) -> Check:
    """`save_steps` and `eval_steps` need the strategy `steps`."""
    strategy, steps = f"{name}_strategy", f"{name}_steps"
    return Check(
        name=f"{name}-strategy", key=steps, effect=Effect.REFUSED, fix={strategy: "steps"},
        problem=lambda case: f"{strategy}={case.get(strategy)} takes no {steps}", remedy=f"set {strategy}=steps",
        holds=lambda case: case.get(steps) and case.get(strategy) not in (None, "steps"),
    )  # fmt: skip


EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
CHECKS = (
    Check(
        name="batch-fields", key="micro_batch_size", effect=Effect.REFUSED, remedy=f"state micro_batch_size and {STEPS}",
        problem=f"at least two of micro_batch_size, {STEPS} and batch_size must be stated",
        holds=lambda case: sum(bool(case.get(key)) for key in ("micro_batch_size", STEPS, "batch_size")) < 2,
        fix=lambda case: {key: 1 for key in ("micro_batch_size", STEPS) if not case.get(key)},
    ),
    _exclusive("two-batches", STEPS, "batch_size"),
    _exclusive("two-warm-ups", "warmup_steps", "warmup_ratio"),
    _exclusive("two-save-intervals", "saves_per_epoch", "save_steps"),
    _exclusive("two-evaluation-intervals", "evals_per_epoch", "eval_steps"),
    _exclusive("deepspeed-and-fsdp", "deepspeed", "fsdp"),
    _steps_word("save"),
    _steps_word("eval"),
    Check(
        name="packing-preferences", key="sample_packing", effect=Effect.REFUSED, problem="it does not work with rl",
        holds=lambda case: case.on("sample_packing") and case.get("rl"), fix={"sample_packing": False}, remedy="switch it off",
    ),
    Check(
        name="bits-without-adapter", key="load_in_4bit", effect=Effect.REFUSED, remedy="set adapter=qlora",
        problem="weights of 4 or 8 bits need an adapter", fix={"load_in_4bit": False, "load_in_8bit": False},
        holds=lambda case: not case.get("adapter") and (case.on("load_in_4bit") or case.on("load_in_8bit")),
    ),
    Check(
        name="qlora-in-8-bits", key="load_in_8bit", effect=Effect.REFUSED, problem="qlora has weights of 4 bits",
        holds=lambda case: case.get("adapter") == "qlora" and case.on("load_in_8bit"),
        fix={"load_in_8bit": False, "load_in_4bit": True}, remedy="use 4 bits",
    ),
    Check(
        name="qlora-without-bits", key="adapter", effect=Effect.REFUSED, problem="qlora needs load_in_4bit",
        holds=lambda case: case.get("adapter") == "qlora" and not case.on("load_in_4bit") and not case.on("load_in_8bit"),
        fix={"load_in_4bit": True}, remedy="set load_in_4bit=true",
    ),
    Check(
        name="offloading-without-checkpointing", key="activation_offloading", effect=Effect.REFUSED,
        problem="it needs gradient_checkpointing", fix={"gradient_checkpointing": True}, remedy="switch it on",
        holds=lambda case: case.get("activation_offloading") and not case.get("gradient_checkpointing"),
    ),
    Check(
        name="fsdp2-8-bit-optimizer", key="optimizer", effect=Effect.REFUSED, fix={"optimizer": "adamw_torch_8bit"},
        problem=lambda case: f"FSDP2 does not work with {_optimizer(case)}", remedy="use adamw_torch_8bit",
        holds=lambda case: _is_fsdp(case) and _version(case) == "2" and _optimizer(case) in EIGHT_BITS[:2],
    ),
    Check(
        name="fsdp-offload-8-bit-optimizer", key="optimizer", effect=Effect.REFUSED, fix={"optimizer": "adamw_torch_fused"},
        problem=lambda case: f"FSDP with offload_params does not work with {_optimizer(case)}", remedy="use adamw_torch_fused",
        holds=lambda case: _is_fsdp(case) and _version(case) != "2" and "8bit" in _optimizer(case)
        and (case.on("fsdp_config.offload_params") or case.on("fsdp_config.fsdp_offload_params")),
    ),
    Check(
        name="tensor-8-bit-optimizer", key="optimizer", effect=Effect.REFUSED, fix={"optimizer": "adamw_torch_8bit"},
        problem=lambda case: f"tensor parallelism does not work with {_optimizer(case)}", remedy="use adamw_torch_8bit",
        holds=lambda case: case.config.tensor_parallel_size > 1 and _optimizer(case) in EIGHT_BITS,
    ),
    Check(
        name="muon-sharding", key="optimizer", effect=Effect.REFUSED, fix={"optimizer": "adamw_torch_fused"},
        problem="muon works with FSDP2 or without sharding", remedy="use FSDP2",
        holds=lambda case: _optimizer(case) == "muon"
        and (case.get("deepspeed") is not None or (_is_fsdp(case) and _version(case) != "2")),
    ),
    Check(
        name="context-attention", key="context_parallel_size", effect=Effect.REFUSED,
        problem="context parallelism needs flash attention", fix={"attn_implementation": "flash_attention_2"},
        holds=lambda case: case.config.context_parallel_size > 1 and "flash" not in _implementation(case),
        remedy="set attn_implementation=flash_attention_2",
    ),
    Check(
        name="context-packing", key="micro_batch_size", effect=Effect.REFUSED, fix={"micro_batch_size": 1},
        problem="context parallelism with sample_packing takes micro-batches of 1 sample", remedy="set it to 1",
        holds=lambda case: case.config.context_parallel_size > 1 and case.on("sample_packing")
        and case.config.micro_batch_size > 1,
    ),
    Check(
        name="attention-word", key="attn_implementation", effect=Effect.REFUSED,
        problem=lambda case: f"{case.get('attn_implementation')} is a short form",
        holds=lambda case: case.get("attn_implementation") in ("flash", "flex", "sdp"),
        fix=lambda case: {"attn_implementation": {"flash": "flash_attention_2", "flex": "flex_attention", "sdp": "sdpa"}[
            case.get("attn_implementation")]}, remedy="use the full name",
    ),
    Check(
        name="lora-kernels-8-bits", key="load_in_8bit", effect=Effect.REFUSED,
        problem="LoRA kernels do not work with weights of 8 bits", remedy="switch the kernels off",
        fix=lambda case: {key: False for key in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel") if case.on(key)},
        holds=lambda case: case.get("adapter") == "lora" and case.on("load_in_8bit")
        and any(map(case.on, ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"))),
    ),
    Check(
        name="two-precisions", key="fp16", effect=Effect.CHANGED, problem="bf16 switches fp16 off", fix={"fp16": False},
        holds=lambda case: both_on(case, "bf16", "fp16"), remedy="use one of them",
    ),
)  # fmt: skip
"""What Axolotl's schemas raise for, that users meet [src/axolotl/utils/schemas/validation.py and peft.py]."""


def _unknown_fields(case: LintCase) -> Iterator[Finding]:
    """Axolotl leaves settings unread that neither it nor its plug-ins have; of plug-ins of others nothing is known."""
    plugins = case.get("plugins") or ()
    if all(str(name).startswith("axolotl.") for name in plugins):
        yield from unknown_fields(case, fields_of("axolotl"), Effect.IGNORED)


def _rewrite(case: LintCase, knob: str, value: Value) -> Settings | None:
    """FSDP2 divides everything; other stages are those of a DeepSpeed file."""
    if knob == "zero_stage":
        shards = value == 3 and case.config.zero_stage == 0 and not _is_fsdp(case) and case.get("deepspeed") is None
        return {VERSION: 2, "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} if shards else {}
    if knob == "tensor_parallel_size" and not (_is_fsdp(case) and _version(case) == "2"):
        return {}
    return None


AXOLOTL = Framework(
    name="axolotl", title="Axolotl", checked="067b021c", options=OPTIONS, read=from_axolotl, checks=CHECKS, rules=RULES,
    rewrite=_rewrite, sizes=sizes_of, undeclared_findings=_unknown_fields,
)  # fmt: skip
