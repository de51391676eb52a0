"""Exports a strategy for Lightning's Trainer as Python code."""

from dataclasses import dataclass

from autotune.frameworks.best_config import Winner
from autotune.frameworks.deepspeed import DEEPSPEED_ENGINES, deepspeed_document, deepspeed_notes
from autotune.frameworks.export import (
    OTHER_FORMATS,
    Checkpoints,
    Export,
    ExportTarget,
    header,
    python_text,
    remarks,
    unplaced_notes,
    unstated_note,
)
from autotune.frameworks.fsdp2 import DECODER_LAYERS, bucket_megabytes, offload_notes, reduction_note

_SHARED = frozenset({"zero_stage", "micro_batch_size", "precision"})
FSDP = ExportTarget(
    format="lightning",
    name="Lightning's FSDPStrategy",
    expressed=_SHARED
    | {"reshard_after_forward", "hsdp_shard_size", "offload_param", "offload_optimizer", "activation_checkpointing"}
    | {"reduce_dtype"},
    refused=OTHER_FORMATS,
)
MODEL_PARALLEL = ExportTarget(
    format="lightning",
    name="Lightning's ModelParallelStrategy",
    expressed=_SHARED | {"tensor_parallel_size"},
    elsewhere={
        "sequence_parallel": "parallelize with SequenceParallel in configure_model",
        "activation_checkpointing": "wrap the layers in configure_model, before fully_shard",
        "reshard_after_forward": "give it to fully_shard in configure_model",
        "hsdp_shard_size": "its mesh has data_parallel and tensor_parallel alone",
    },
    refused=OTHER_FORMATS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strategy:
    """The code of a strategy, and its notes."""

    imports: tuple[str, ...]
    constructor: str
    """The expression that creates it."""
    notes: tuple[str, ...]
    checkpoints: Checkpoints = Checkpoints.DISTRIBUTED
    same: tuple[str, ...] = ()
    """Our engines that run the library on which it is based."""
    before: str = ""
    """Code lines that must precede it."""


def export_lightning(winner: Winner) -> Export:
    """Return a module with `strategy`, and the arguments of the Trainer around it."""
    strategy = _strategy(winner)
    own_notes = [*_stated_notes(winner, strategy), *strategy.notes]
    if not winner.on_gpus and winner.config.zero_stage > 0:
        own_notes.insert(0, "measured on CPUs: Lightning runs sharded strategies on GPUs alone")
    notes = remarks(winner, own_notes, strategy.checkpoints, strategy.same)
    arguments = python_text(_trainer(winner, strategy))
    parts = [
        header(winner, "Lightning", notes),
        "\n".join(sorted(strategy.imports)) + "\n",
        f"{strategy.before}strategy = {strategy.constructor}\n",
        f'trainer = {arguments}\n"""Arguments of `lightning.pytorch.Trainer(strategy=strategy, **trainer)`."""\n',
        f'micro_batch_size = {winner.config.micro_batch_size}\n"""The batch_size of the DataLoader."""\n',
    ]
    return Export(text="\n".join(parts), notes=notes)


def _strategy(winner: Winner) -> _Strategy:
    """DDP without sharding; DTensors for tensor parallelism; FSDP for settings only it has; else DeepSpeed (has buckets)."""
    config = winner.config
    if config.tensor_parallel_size > 1:
        return _model_parallel(winner)
    if config.zero_stage == 0:
        return _ddp(winner)
    if config.zero_stage == 3 and (winner.engine == "fsdp2" or config.hsdp_shard_size or not config.reshard_after_forward):
        return _fsdp(winner)
    return _deepspeed(winner)


def _ddp(winner: Winner) -> _Strategy:
    ddp = ExportTarget(
        format="lightning", name="Lightning's DDPStrategy", expressed=_SHARED | {"reduce_bucket_size"}, refused=OTHER_FORMATS
    )
    ddp.require(winner.config)
    return _Strategy(
        imports=("from lightning.pytorch.strategies import DDPStrategy",),
        constructor=f"DDPStrategy(bucket_cap_mb={bucket_megabytes(winner.config)}, gradient_as_bucket_view=True)",
        notes=tuple(ddp.unexpressed(winner.config)),
        same=("ddp",),
    )


def _fsdp(winner: Winner) -> _Strategy:
    FSDP.require(winner.config)
    config, layer = winner.config, _layer(winner)
    arguments = [
        f'sharding_strategy="{_sharding(winner)}"',
        f"cpu_offload={config.offload_param == 'cpu'}",
        'state_dict_type="sharded"',
    ]
    if winner.shard_size < winner.zero_ranks:
        arguments.append(f"device_mesh=({winner.zero_ranks // winner.shard_size}, {winner.shard_size})")
    if layer is not None:
        arguments.append(f"auto_wrap_policy={{{layer}}}")
        if config.activation_checkpointing != "none":
            arguments.append(f"activation_checkpointing_policy={{{layer}}}")
    imports = ["from lightning.pytorch.strategies import FSDPStrategy"]
    if layer is not None and winner.shape is not None:
        package = winner.shape.family.removesuffix("_text")
        imports.append(f"from transformers.models.{package}.modeling_{package} import {layer}")
    return _Strategy(imports=tuple(imports), constructor=_call("FSDPStrategy", arguments), notes=tuple(_fsdp_notes(winner)))


def _sharding(winner: Winner) -> str:
    hybrid = winner.shard_size < winner.zero_ranks
    if winner.config.reshard_after_forward:
        return "HYBRID_SHARD" if hybrid else "FULL_SHARD"
    return "_HYBRID_SHARD_ZERO2" if hybrid else "SHARD_GRAD_OP"


def _fsdp_notes(winner: Winner) -> list[str]:
    config = winner.config
    notes = ["this is FSDP1, Lightning's own; for FSDP2 use its ModelParallelStrategy", *offload_notes(config, "FSDPStrategy")]
    notes += reduction_note(config, "FSDPStrategy", "give it a mixed_precision of this reduce_dtype")
    if _layer(winner) is None:
        notes.append("give auto_wrap_policy (and activation_checkpointing_policy) your model's layer class")
    if config.activation_checkpointing == "selective":
        notes.append("activation_checkpointing=selective: FSDPStrategy knows full alone, which is switched on")
    return notes + FSDP.unexpressed(config)


def _model_parallel(winner: Winner) -> _Strategy:
    MODEL_PARALLEL.require(winner.config)
    config = winner.config
    arguments = [f"data_parallel_size={winner.data_parallel_size}", f"tensor_parallel_size={config.tensor_parallel_size}"]
    notes = ["write configure_model of your LightningModule: parallelize_module, then fully_shard, over self.device_mesh"]
    if config.zero_stage != 3 and winner.data_parallel_size > 1:
        notes.append(f"zero_stage={config.zero_stage}: fully_shard with reshard_after_forward=False is the nearest")
    return _Strategy(
        imports=("from lightning.pytorch.strategies import ModelParallelStrategy",),
        constructor=_call("ModelParallelStrategy", arguments),
        notes=(*notes, *MODEL_PARALLEL.unexpressed(config)),
    )


def _deepspeed(winner: Winner) -> _Strategy:
    FSDP.require(winner.config)
    # Lightning takes the batch size from the Trainer and the DataLoader, and refuses accumulation steps here.
    config = {
        name: value
        for name, value in deepspeed_document(winner).items()
        if name not in ("train_batch_size", "gradient_accumulation_steps")
    }
    return _Strategy(
        imports=("from lightning.pytorch.strategies import DeepSpeedStrategy",),
        before=f"config = {python_text(config)}\n",
        constructor="DeepSpeedStrategy(config=config)",
        notes=tuple(deepspeed_notes(winner)),
        checkpoints=Checkpoints.DEEPSPEED,
        same=DEEPSPEED_ENGINES,
    )


def _trainer(winner: Winner, strategy: _Strategy) -> dict[str, object]:
    trainer: dict[str, object] = {
        "accelerator": "gpu" if winner.on_gpus else "cpu",
        "devices": winner.ranks_per_node,
        "num_nodes": winner.nodes,
        "precision": _precision(winner, strategy),
        "accumulate_grad_batches": winner.gradient_accumulation_steps,
    }
    if (
        strategy.checkpoints is not Checkpoints.DEEPSPEED and winner.hyperparameters.clip is not None
    ):  # DeepSpeed clips by itself
        trainer["gradient_clip_val"] = winner.hyperparameters.clip
    return trainer


def _precision(winner: Winner, strategy: _Strategy) -> str:
    precision = winner.config.precision
    # For fp8, DeepSpeed's configuration states bf16; the model itself computes the fp8 products.
    by_deepspeed = precision == "fp8" and strategy.checkpoints is Checkpoints.DEEPSPEED
    precisions = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp64": "64-true", "fp8": "transformer-engine"}
    return precisions["bf16" if by_deepspeed else precision]


def _stated_notes(winner: Winner, strategy: _Strategy) -> list[str]:
    """Notes about hyperparameters; DeepSpeed's strategy has its own."""
    if strategy.checkpoints is Checkpoints.DEEPSPEED:
        return []
    remedy = "it belongs to the optimizer that configure_optimizers makes"
    clip = unstated_note(winner, "left out, the Trainer does not clip", "clip")
    return [*unplaced_notes(winner, remedy, "lr", "weight_decay", "optimizer"), *clip]


def _layer(winner: Winner) -> str | None:
    return DECODER_LAYERS.get(winner.shape.family) if winner.shape else None


def _call(name: str, arguments: list[str]) -> str:
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
