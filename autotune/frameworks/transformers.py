"""Exports keyword arguments of `transformers.TrainingArguments` as JSON."""

import json
from typing import Any

from autotune.frameworks.best_config import Winner
from autotune.frameworks.deepspeed import BY_TORCHAO, DEEPSPEED_ENGINES, RECOMPUTATION, deepspeed_document, deepspeed_notes
from autotune.frameworks.export import OTHER_FORMATS, Checkpoints, Export, ExportTarget, remarks, unstated_note
from autotune.frameworks.fsdp2 import bucket_megabytes
from autotune.frameworks.peft import ADAPTER_KNOBS, peft_notes
from search_spaces.kernels import LIGER, TRANSFORMER_ENGINE
from search_spaces.optimizers import BF16_MASTERS, SGD_MOMENTUM
from search_spaces.trial_config import TrialConfig

TARGET = ExportTarget(
    format="transformers",
    name="TrainingArguments",
    expressed=frozenset({
        "zero_stage", "micro_batch_size", "precision", "activation_checkpointing", "fused_optimizer", "reduce_bucket_size",
        "optimizer", "fused_kernels", *ADAPTER_KNOBS,
    }),
    elsewhere={
        "attention_backend": "give from_pretrained an attn_implementation",
        "pack_sequences": "give the Trainer a DataCollatorWithFlattening, and from_pretrained "
        "attn_implementation=flash_attention_2; or use TRL's SFTConfig with packing=True",
        "attention_window": "give from_pretrained this sliding_window, where the model's class has one",
    },
    refused=OTHER_FORMATS,
)  # fmt: skip
STATED = ("lr", "weight_decay", "clip", "optimizer")


def export_transformers(winner: Winner) -> Export:
    """Return the JSON object for `TrainingArguments(**…)`: DeepSpeed for ZeRO and tensor parallelism, else DDP."""
    config = winner.config
    TARGET.require(config)
    content = _common(winner)
    if _by_deepspeed(config):
        # The Trainer fills in what is not stated: it creates the optimizer, and clips by its other arguments.
        content["deepspeed"] = {"gradient_clipping": "auto", **deepspeed_document(winner)}
    else:
        content["ddp_bucket_cap_mb"] = bucket_megabytes(config)
    notes = remarks(winner, _notes(winner), Checkpoints.TRAINER, DEEPSPEED_ENGINES if _by_deepspeed(config) else ("ddp",))
    return Export(text=json.dumps(content, indent=2) + "\n", notes=notes)


def _by_deepspeed(config: TrialConfig) -> bool:
    return config.zero_stage > 0 or config.tensor_parallel_size > 1


def _common(winner: Winner) -> dict[str, Any]:
    config = winner.config
    content: dict[str, Any] = {
        "output_dir": "output",
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": winner.gradient_accumulation_steps,
        "bf16": config.precision in ("bf16", "fp8"),
        "fp16": config.precision == "fp16",
        "gradient_checkpointing": config.activation_checkpointing != "none",
        **_stated(winner),
    }
    if content["gradient_checkpointing"]:
        content["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if config.fused_kernels == LIGER:
        content["use_liger_kernel"] = True
    if not winner.on_gpus and not _by_deepspeed(config):  # with it the Trainer would not use DeepSpeed
        content["use_cpu"] = True
    return content


def _stated(winner: Winner) -> dict[str, Any]:
    hyperparameters = winner.hyperparameters
    values = {
        "learning_rate": hyperparameters.lr,
        "weight_decay": hyperparameters.weight_decay,
        "max_grad_norm": hyperparameters.clip,
    }
    optimizer = {} if hyperparameters.optimizer is None else _optimizer(winner.config)
    return {**optimizer, **{name: value for name, value in values.items() if value is not None}}


def _optimizer(config: TrialConfig) -> dict[str, str]:
    match config.optimizer:
        case "sgd":
            return {"optim": "sgd", "optim_args": f"momentum={SGD_MOMENTUM}"}
        case "adamw8bit":
            return {"optim": "adamw_torch_8bit"}
        case _:
            return {"optim": "adamw_torch_fused" if config.fused_optimizer else "adamw_torch"}


def _notes(winner: Winner) -> list[str]:
    config, notes = winner.config, peft_notes(winner)
    notes += unstated_note(winner, "left out, TrainingArguments' own defaults hold", *STATED)
    if winner.hyperparameters.optimizer is None and not config.fused_optimizer:
        notes.append("fused_optimizer=False: choose an optim that is not fused, such as adamw_torch")
    if config.activation_checkpointing == "selective":
        notes.append("activation_checkpointing=selective: TrainingArguments know full alone, which is switched on")
    if config.fused_kernels == LIGER:
        notes.append("fused_kernels=liger: use_liger_kernel patches models that liger_kernel knows, and asks for the package")
    if config.fused_kernels == TRANSFORMER_ENGINE:
        notes.append("fused_kernels=transformer_engine: put norms of transformer_engine.pytorch into the model")
    if config.precision == "fp64":
        notes.append("precision=fp64: load the model with dtype=torch.float64")
    if config.precision == "fp8" and not _by_deepspeed(config):
        notes.append("precision=fp8: as bf16; convert the model with torchao.float8.convert_to_float8_training beforehand")
    if config.optimizer == "onebit_adam" and not _by_deepspeed(config):
        notes.append("optimizer=onebit_adam: AdamW is written; no optimizer that Transformers can make sends signs")
    if config.optimizer == BF16_MASTERS:
        notes.append(f"optimizer={BF16_MASTERS}: {BY_TORCHAO}, as optimizer_cls_and_kwargs of the Trainer; AdamW is written")
    if config.optimizer in ("lamb", "muon") and not _by_deepspeed(config):
        notes.append(
            f"optimizer={config.optimizer}: TrainingArguments have no such name; give the Trainer an optimizer_cls_and_kwargs"
        )
    if config.zero_stage == 3:
        notes.append("for ZeRO stage 3 make the TrainingArguments before the model, so that it is divided while it is loaded")
    # Knobs that a DeepSpeed configuration cannot express, but TrainingArguments or their context can.
    here = frozenset({"activation_checkpointing", "fused_kernels", "fused_optimizer", *STATED[:3], *ADAPTER_KNOBS})
    if _by_deepspeed(config):
        skipped_prefixes = ("not stated: ", RECOMPUTATION)
        return notes + [
            note for note in deepspeed_notes(winner) if note.split("=")[0] not in here and not note.startswith(skipped_prefixes)
        ]
    return notes + TARGET.unexpressed(config)
