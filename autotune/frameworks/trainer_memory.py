"""What a recipe of a program that trains with the Trainer states of what Transformers, PEFT and bitsandbytes keep."""

from collections.abc import Mapping
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.imported import switch_of
from autotune.frameworks.shell import LAUNCHER
from autotune.frameworks.trainer_table import TrainerTable, TrainingProgram

DOUBLE = ("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "double_quantization")
"""Switches of scales that are quantised too."""
REENTRANT = (
    "gradient_checkpointing_kwargs.use_reentrant", "gradient_checkpointing_use_reentrant", "use_reentrant_gc",
    "activation_checkpointing_kwargs.use_reentrant",
)  # fmt: skip


def memory_arguments(settings: Mapping[str, Any], program: TrainingProgram) -> dict[str, str] | None:
    """The words of `Transformers`; None: a setting cannot be read.

    Accelerate puts parameters that FSDP divides in fp32 if precision is mixed. PEFT's preparation of quantised models leaves
    out those that FSDP divides.
    """
    table = TrainerTable(settings, "", program)
    try:
        half, quantised = table.on("bf16") or table.on("fp16"), table.on("load_in_4bit") or table.on("load_in_8bit")
        deepspeed = table.field("deepspeed") or settings.get(f"{LAUNCHER}use_deepspeed")
        fsdp = table.field("fsdp") or settings.get(f"{LAUNCHER}use_fsdp") or any(key.startswith("fsdp") for key in settings)
        optimizer, packs = str(table.field("optimizer")), table.on("pack_sequences")
    except RequestError:
        return None
    loaded = program.loads_in_precision or table.field("dtype") is not None or switch_of(settings.get("pure_bf16")) is True
    double = next((switch_of(settings[key]) for key in DOUBLE if key in settings), None)
    reentrant = next((switch_of(settings[key]) for key in REENTRANT if key in settings), True)
    version = 2 if str(settings.get("fsdp_version", settings.get("fsdp_config.fsdp_version", "1"))) == "2" else 1
    return {
        "states": "true",
        "sharding": "zero" if deepspeed else f"fsdp{version}" if fsdp else "none",
        "parameter_width": "2" if loaded and half and not fsdp else "4",
        "adapter_dropout": str(settings.get("lora_dropout", 0) not in (0, "0", "0.0", None)),
        "reentrant": str(reentrant is not False),
        "update": "foreach" if optimizer == "adamw_torch" else "fused",
        "varying_lengths": str(not packs),
        **(program.quantised_words if quantised and not fsdp else {}),
        **({} if double is None else {"double_quantised": str(double)}),
    }
