"""Reads a DeepSpeed configuration as knobs."""

from collections.abc import Mapping
from typing import Any

from autotune.errors import RequestError
from autotune.exports.winner import Stated
from autotune.imports.imported import AUTO, FlatTable, Imported
from search_spaces.deepspeed.config import KEEP_ALL, REDUCTION
from search_spaces.knob_values import value_text
from search_spaces.trial_config import TrialConfig

DEEPSPEED_FORMAT = "deepspeed"
ZERO = "zero_optimization."
SAME = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    f"{ZERO}stage": "zero_stage",
    f"{ZERO}reduce_bucket_size": "reduce_bucket_size",
    f"{ZERO}allgather_bucket_size": "allgather_bucket_size",
    f"{ZERO}stage3_prefetch_bucket_size": "prefetch_bucket_size",
    f"{ZERO}stage3_param_persistence_threshold": "param_persistence_threshold",
    f"{ZERO}stage3_max_live_parameters": "max_live_parameters",
    f"{ZERO}overlap_comm": "overlap_comm",
    f"{ZERO}contiguous_gradients": "contiguous_gradients",
    f"{ZERO}offload_optimizer.device": "offload_optimizer",
    f"{ZERO}offload_optimizer.ratio": "offload_ratio",
    f"{ZERO}offload_param.device": "offload_param",
}
"""Key -> the knob that has the same values."""
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lamb": "lamb", "muon": "muon"}
"""Optimizer type in lower case -> our name. DeepSpeed's Adam applies decoupled weight decay, as AdamW does."""
DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16", "bfloat16": "bf16"}


def from_deepspeed(content: Mapping[str, Any], source: str) -> Imported:
    """Read the configuration.

    Args:
        content: the parsed JSON.
        source: the file's name, for messages.

    Raises:
        RequestError: DeepSpeed does not accept a value, or a value is outside its knob's domain.
    """
    table = FlatTable(content, source)
    for key, name in SAME.items():
        table.knob(key, name)
    # DeepSpeed also accepts these without the prefix `stage3_`.
    for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters"):
        table.knob(f"{ZERO}{name}", name)
    key = "tensor_parallel.autotp_size"
    if (size := table.number(key, default=0)) > 1:  # 0 and 1 switch it off
        if size != int(size):
            raise RequestError(key, f"{size:g} in {source} is not a whole number", "give a whole number")
        table.set("tensor_parallel_size", int(size), key)
    table.assumed |= {"micro_batch_size": 1, "activation_checkpointing": "none"}
    as_deepspeed_does(table)
    _reuse(table)
    _precision(table)
    hyperparameters = _stated(table)
    steps, batch = table.whole("gradient_accumulation_steps"), table.whole("train_batch_size")
    micro = table.knobs.get("micro_batch_size")
    if micro is None and batch is not None and steps is not None:
        table.notes.append(
            "train_micro_batch_size_per_gpu is not stated: it follows from the number of ranks; the default is 1"
        )
    samples = int(micro) * steps if micro is not None and steps is not None else None
    return table.imported(
        format=DEEPSPEED_FORMAT, global_batch_size=batch, samples_per_rank=samples, hyperparameters=hyperparameters
    )


def as_deepspeed_does(table: FlatTable) -> None:
    """Leave out settings that DeepSpeed silently ignores (`autotune lint deepspeed` reports them too), and add its defaults for
    missing settings: at stages 1 and 2 it reduces after backward, at stage 3 it overlaps the reduction with backward."""
    stage, offloads = table.knobs.get("zero_stage", 0), table.knobs.get("offload_optimizer", "none") != "none"
    ignored = {"allgather_bucket_size": "DeepSpeed never reads it"}
    if stage == 0:
        ignored |= dict.fromkeys(REDUCTION, "stage 0 reduces after backward, in buckets of its own")
        ignored |= dict.fromkeys(("offload_optimizer", "offload_ratio"), "stage 0 offloads nothing")
    if stage != 3:
        ignored["offload_param"] = f"stage {stage} keeps its parameters where they are"
    if stage in (1, 2) and offloads:
        ignored["contiguous_gradients"] = "gradients are copied into one buffer to be offloaded"
    for name, why in ignored.items():
        value = table.knobs.pop(name, None)
        if value is not None and value != getattr(TrialConfig(), name):
            table.notes.append(f"{name}={value_text(value)}: {why}; it was left at the default")
    if stage in (1, 2):
        table.knobs.setdefault("overlap_comm", False)
    if stage:
        table.knobs.setdefault("reduce_bucket_size", 500_000_000)  # DeepSpeed's default


def reduces_as_it_computes(table: FlatTable) -> None:
    """If the file does not state the dtype of reductions, it is that of mixed precision: half the bytes of our default."""
    precision = table.knobs.get("precision", "fp32")
    if precision in ("bf16", "fp16"):
        table.knobs.setdefault("reduce_dtype", precision)


def _reuse(table: FlatTable) -> None:
    """Read how far ahead DeepSpeed looks before it frees gathered parameters: not at all, the whole step, or in between."""
    if table.knobs.get("zero_stage") != 3:
        return
    key = f"{ZERO}stage3_max_reuse_distance"
    distance = table.number(key, f"{ZERO}max_reuse_distance", default=1e9)  # DeepSpeed's default
    if distance in (0, KEEP_ALL):
        table.set("reshard_after_forward", distance == 0)
        return
    table.notes.append(
        f"{key}={distance:g}: DeepSpeed keeps parameters that it reuses within this distance, trials keep none; for a "
        'model of at most half this size add --baseline FILE with {"reshard_after_forward": false}'
    )


def _precision(table: FlatTable) -> None:
    """bf16 and fp16 are tables with one switch each; if both are off, the precision is fp32.

    A switch that is "auto" is set by the Trainer's arguments of this name; which of them is given, the file does not state.
    """
    auto = [
        key for name in ("bfloat16", "bf16", "fp16") for key in (f"{name}.enabled", name) if table.settings.get(key) == AUTO
    ]
    precision = "fp16" if auto and auto[0].startswith("fp16") else "bf16"
    for key in auto:
        table.drop(key)
        decides = "an argument of the Trainer decides it, which the file does not state"
        table.notes.append(f"{key}=auto: {decides}; predictions for GPUs take {precision}, write true or false instead")
    bf16, fp16 = table.switch("bf16.enabled"), table.switch("fp16.enabled")
    if (older := table.switch("bfloat16.enabled")) is not None:
        bf16 = older
    if bf16 or fp16:
        table.set("precision", "bf16" if bf16 else "fp16")
    elif auto:
        table.assumed |= {"precision": precision, "reduce_dtype": precision}
        table.keys["precision"] = auto[0]
    elif bf16 is False or fp16 is False:
        table.set("precision", "fp32")
    table.set("reduce_dtype", table.choice("communication_data_type", DTYPES))
    reduces_as_it_computes(table)


def _stated(table: FlatTable) -> Stated:
    """Read the hyperparameters, and whether the optimizer is fused."""
    kind = table.take("optimizer.type")
    optimizer = OPTIMIZERS.get(str(kind).lower())
    if kind is not None and optimizer is None:
        optimizer_names = ", ".join(sorted(set(OPTIMIZERS.values())))
        table.notes.append(
            f"optimizer.type={kind}: not among {optimizer_names}; trials train with their default, and exports leave it out"
        )
    if table.switch("optimizer.params.torch_adam"):
        table.set("fused_optimizer", bool(table.switch("optimizer.params.fused")))
    rate = table.quantity("optimizer.params.lr")
    if rate == 0:
        table.notes.append("optimizer.params.lr=0: this would train nothing; it was left out")
    return Stated(
        lr=rate or None,
        weight_decay=table.quantity("optimizer.params.weight_decay"),
        clip=table.quantity("gradient_clipping"),
        optimizer=optimizer,
    )
