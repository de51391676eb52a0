"""LLaMA-Factory's YAML and command lines: read, and what its parser refuses (checked with ff6d4d12)."""

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.frameworks.framework import Check, Framework, LintCase, Option
from autotune.frameworks.imported import Imported
from autotune.frameworks.trainer import read_trainer
from autotune.frameworks.trainer_checks import (
    OF_EVERY_TRAINER,
    OF_TRAINER,
    RULES,
    STEPS,
    exclude,
    fields_of,
    is_set,
    one_of,
    refuse_method,
    refused,
    sizes_of,
    unknown_fields,
)
from autotune.frameworks.trainer_table import TrainerTable, TrainingProgram, memory_arguments
from search_spaces.errors import Effect, Finding

OPTIONS = (
    *OF_TRAINER,
    Option("disable_gradient_checkpointing", "activation_checkpointing", words={"none": True, "full": False}),
    Option("cutoff_len", field="sequence_length"),
    Option("finetuning_type", field="adapter"), Option("lora_rank", "lora_rank"),
    Option("lora_target", "lora_targets", changes=False), Option("quantization_bit", field="frozen_bits"),
    Option("packing", "pack_sequences"), Option("neat_packing", "pack_sequences"),
    Option("flash_attn", "attention_backend", words={"best": "sdpa", "flash": "fa2", "math": "disabled"}),
    Option("enable_liger_kernel", "fused_kernels", words={"none": False, "liger": True}),
    Option("pure_bf16", field="bf16"), Option("fp8", field="fp8"),
)  # fmt: skip
PROGRAM = TrainingProgram(
    quantised_words={"double_quantised": "true"},
    title="LLaMA-Factory ff6d4d12", options=OPTIONS,
    noted=("use_dora", "additional_target", "use_unsloth", "use_unsloth_gc", "resize_vocab"),
    methods=("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro", "use_kt", "use_asft_loss",
             "mixture_of_depths", "shift_attn", "sequence_parallel_size", "tensor_model_parallel_size",
             "pipeline_model_parallel_size", "expert_model_parallel_size"),
    defaults={
        "per_device_train_batch_size": 8, STEPS: 1, "cutoff_len": 2048, "finetuning_type": "lora", "lora_rank": 8,
        "lora_target": "all", "optim": "adamw_torch_fused", "disable_gradient_checkpointing": False,
    },
)  # fmt: skip


def from_llama_factory(content: Mapping[str, Any], source: str) -> Imported:
    """Read the file or the command line.

    Raises:
        RequestError: a value is not valid.
    """
    table = TrainerTable(content, source, PROGRAM)
    if table.settings.get("stage") == "pt" and table.settings.get("packing") is None:
        table.set("pack_sequences", True, "stage")
    stage = str(table.settings.get("stage", "sft"))
    if stage not in ("pt", "sft"):
        refuse_method(table, "stage", stage)
    return read_trainer(table)


def _method(case: LintCase) -> str:
    return str(case.get("finetuning_type", "lora"))


def _evaluates(case: LintCase) -> bool:
    by_strategy = str(case.get("eval_strategy", "no")).lower() in ("steps", "epoch")
    return by_strategy or any(map(case.on, ("do_eval", "do_predict", "predict_with_generate")))


def _needs_sft(key: str) -> Check:
    return refused(f"sft-{key.replace('_', '-')}", key, "only the stage sft has it",
                   lambda case: case.on(key) and case.get("stage", "sft") != "sft", {key: False})  # fmt: skip


def _needs_lora(key: str) -> Check:
    return refused(f"lora-{key.replace('_', '-')}", key, "only finetuning_type=lora has it",
                   lambda case: is_set(case, key) and _method(case) != "lora", {key: None})  # fmt: skip


LOW_RANK = ("use_galore", "use_apollo", "use_badam")
CHECKS = (
    *OF_EVERY_TRAINER,
    one_of("finetuning_type", ("lora", "oft", "freeze", "full")), one_of("stage", ("sft", "pt", "rm", "ppo", "dpo", "kto")),
    one_of("flash_attn", ("auto", "disabled", "sdpa", "fa2", "fa3")),
    *map(_needs_sft, ("neat_packing", "predict_with_generate", "train_on_prompt", "mask_history")),
    *map(_needs_lora, ("loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init", "adapter_name_or_path")),
    refused("bits-of-a-full-model", "quantization_bit",
            lambda case: f"finetuning_type={_method(case)} does not train weights of {case.get('quantization_bit')} bits",
            lambda case: is_set(case, "quantization_bit") and _method(case) not in ("lora", "oft"), {"quantization_bit": None}),
    refused("low-rank-optimizers", "finetuning_type", "GaLore, APOLLO and BAdam do not train adapters",
            lambda case: _method(case) == "lora" and any(map(case.on, LOW_RANK)), {"finetuning_type": "full"}),
    refused("low-rank-deepspeed", "deepspeed", "GaLore and APOLLO do not work with DeepSpeed",
            lambda case: is_set(case, "deepspeed") and any(map(case.on, LOW_RANK[:2])), {"deepspeed": None}),
    refused("layerwise-ranks", "finetuning_type", "layer-wise GaLore and APOLLO run on one rank",
            lambda case: (case.ranks or 1) > 1 and any(case.on(key) and case.on(f"{key.removeprefix('use_')}_layerwise")
                                                       for key in LOW_RANK[:2]), {}, "switch galore_layerwise off"),
    refused("pure-bf16-stage-3", "pure_bf16", "it does not work with ZeRO stage 3",
            lambda case: case.on("pure_bf16") and is_set(case, "deepspeed") and case.config.zero_stage == 3,
            {"pure_bf16": None, "bf16": True}),
    exclude("val_size", "eval_dataset"), exclude("streaming", "max_samples"), exclude("train_on_prompt", "mask_history"),
    refused("use-llama-pro", "use_llama_pro", "it needs freeze or lora",
            lambda case: case.on("use_llama_pro") and _method(case) == "full", {"use_llama_pro": False}),
    refused("streaming-steps", "max_steps", "streaming needs the number of steps",
            lambda case: case.on("streaming") and case.get("max_steps", -1) == -1, {}, "state it"),
    refused("no-evaluation-data", "do_eval", "evaluation needs eval_dataset or val_size",
            lambda case: _evaluates(case) and not is_set(case, "eval_dataset") and not is_set(case, "val_size"),
            {"val_size": 0.1}),
)  # fmt: skip
"""What LLaMA-Factory's parser raises for, that users meet [src/llamafactory/hparams]."""


def _unknown_fields(case: LintCase) -> Iterator[Finding]:
    yield from unknown_fields(case, fields_of("transformers", "llama-factory"), Effect.REFUSED)


LLAMA_FACTORY = Framework(
    name="llama-factory", title="LLaMA-Factory", checked="ff6d4d12", options=OPTIONS, read=from_llama_factory, checks=CHECKS,
    rules=RULES, sizes=sizes_of, undeclared_findings=_unknown_fields,
    memory_arguments=lambda settings: memory_arguments(settings, PROGRAM),
)  # fmt: skip
