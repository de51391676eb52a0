"""LLaMA-Factory's YAML and command lines: read, and what its parser refuses (checked with ff6d4d12)."""

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.frameworks.framework import Check, Framework, LintCase, Option
from autotune.frameworks.imported import Imported
from autotune.frameworks.trainer import TrainerTable, TrainingProgram, read_trainer
from autotune.frameworks.trainer_checks import (
    OF_EVERY_TRAINER,
    OF_TRAINER,
    RULES,
    STEPS,
    fields_of,
    refuse_method,
    sizes_of,
    unknown_fields,
)
from search_spaces.finding import Effect, Finding

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
    title="LLaMA-Factory ff6d4d12", options=OPTIONS,
    noted=("use_dora", "additional_target", "use_unsloth", "use_unsloth_gc", "resize_vocab"),
    methods=("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro", "use_kt", "use_asft_loss",
             "mixture_of_depths", "shift_attn", "sequence_parallel_size"),
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
    stage = str(table.settings.get("stage", "sft"))
    if stage not in ("pt", "sft"):
        refuse_method(table, "stage", stage)
    return read_trainer(table)


def _method(case: LintCase) -> str:
    return str(case.get("finetuning_type", "lora"))


def _needs_sft(key: str) -> Check:
    return Check(
        name=f"sft-{key.replace('_', '-')}", key=key, effect=Effect.REFUSED, problem="only the stage sft has it",
        holds=lambda case: case.on(key) and case.get("stage", "sft") != "sft", fix={key: False}, remedy="switch it off",
    )  # fmt: skip


def _needs_lora(key: str) -> Check:
    return Check(
        name=f"lora-{key.replace('_', '-')}", key=key, effect=Effect.REFUSED, problem="only finetuning_type=lora has it",
        holds=lambda case: case.get(key) not in (None, False) and _method(case) != "lora", fix={key: None},
        remedy="leave it out",
    )  # fmt: skip


CHECKS = (
    *OF_EVERY_TRAINER,
    Check(
        name="method", key="finetuning_type", effect=Effect.REFUSED,
        problem=lambda case: f"{_method(case)!r} is not one of lora, oft, freeze and full",
        holds=lambda case: _method(case) not in ("lora", "oft", "freeze", "full"), remedy="use lora or full",
    ),
    Check(
        name="stage", key="stage", effect=Effect.REFUSED,
        problem=lambda case: f"{case.get('stage')!r} is not one of pt, sft, rm, ppo, dpo and kto",
        holds=lambda case: case.get("stage", "sft") not in ("pt", "sft", "rm", "ppo", "dpo", "kto"), fix={"stage": "sft"},
        remedy="use sft",
    ),
    Check(
        name="bits-of-a-full-model", key="quantization_bit", effect=Effect.REFUSED,
        problem=lambda case: f"finetuning_type={_method(case)} does not train a model of {case.get('quantization_bit')} bits",
        holds=lambda case: case.get("quantization_bit") and _method(case) not in ("lora", "oft"),
        fix={"quantization_bit": None}, remedy="use lora",
    ),
    Check(
        name="adapter-of-a-full-model", key="adapter_name_or_path", effect=Effect.REFUSED,
        problem="only finetuning_type=lora continues an adapter", remedy="use lora",
        holds=lambda case: case.get("adapter_name_or_path") and _method(case) != "lora",
    ),
    *map(_needs_sft, ("neat_packing", "predict_with_generate", "train_on_prompt", "mask_history")),
    *map(_needs_lora, ("loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init")),
    Check(
        name="low-rank-optimizers", key="finetuning_type", effect=Effect.REFUSED,
        problem="GaLore, APOLLO and BAdam do not train adapters", fix={"finetuning_type": "full"}, remedy="use full",
        holds=lambda case: _method(case) == "lora" and any(map(case.on, ("use_galore", "use_apollo", "use_badam"))),
    ),
    Check(
        name="low-rank-deepspeed", key="deepspeed", effect=Effect.REFUSED, remedy="leave DeepSpeed out",
        problem="GaLore and APOLLO do not work with DeepSpeed",
        holds=lambda case: case.get("deepspeed") is not None and any(map(case.on, ("use_galore", "use_apollo"))),
    ),
    Check(
        name="pure-bf16-stage-3", key="pure_bf16", effect=Effect.REFUSED, problem="it does not work with ZeRO stage 3",
        holds=lambda case: case.on("pure_bf16") and case.get("deepspeed") is not None and case.config.zero_stage == 3,
        fix={"pure_bf16": None, "bf16": True}, remedy="use bf16",
    ),
    Check(
        name="llama-pro-of-a-full-model", key="use_llama_pro", effect=Effect.REFUSED, problem="it needs freeze or lora",
        holds=lambda case: case.on("use_llama_pro") and _method(case) == "full", fix={"use_llama_pro": False},
        remedy="leave it out",
    ),
    Check(
        name="streaming-steps", key="max_steps", effect=Effect.REFUSED, problem="streaming needs the number of steps",
        holds=lambda case: case.on("streaming") and case.get("max_steps", -1) == -1, remedy="state max_steps",
    ),
    Check(
        name="no-evaluation-data", key="do_eval", effect=Effect.REFUSED, problem="evaluation needs eval_dataset or val_size",
        holds=lambda case: any(map(case.on, ("do_eval", "do_predict", "predict_with_generate")))
        and not case.get("eval_dataset") and not case.get("val_size"), fix={"val_size": 0.1}, remedy="state one of them",
    ),
)  # fmt: skip
"""What LLaMA-Factory's parser raises for, that users meet [src/llamafactory/hparams]."""


def _unknown_fields(case: LintCase) -> Iterator[Finding]:
    yield from unknown_fields(case, fields_of("transformers", "llama-factory"), Effect.REFUSED)


LLAMA_FACTORY = Framework(
    name="llama-factory", title="LLaMA-Factory", checked="ff6d4d12", options=OPTIONS, read=from_llama_factory, checks=CHECKS,
    rules=RULES, sizes=sizes_of, undeclared_findings=_unknown_fields,
)  # fmt: skip
