"""One point of the space: a value for every knob, canonical and hashed."""

import dataclasses
import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.errors import UnknownNameError

Value = bool | int | float | str
SCRIPT = "script"
"""The knob that holds what a user's own script is told beside the other knobs."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrialConfig:
    """A value for every knob. `search_spaces.knobs` states each one's unit, domain and condition.

    Sizes of buckets are elements, not bytes. Data-parallel degree and gradient accumulation are derived:
    see `data_parallel_size` and `gradient_accumulation_steps`.
    """

    zero_stage: int = 0
    micro_batch_size: int = 1
    reduce_bucket_size: int = 40_000_000
    allgather_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    overlap_comm: bool = True
    contiguous_gradients: bool = True
    defer_gradient_reduction: bool = False
    reduce_dtype: str = "fp32"
    hsdp_shard_size: int = 0
    reshard_after_forward: bool = True
    offload_optimizer: str = "none"
    offload_param: str = "none"
    offload_ratio: float = 1.0
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_parallel_size: int = 1
    virtual_stages: int = 1
    pipeline_schedule: str = "1f1b"
    pipeline_split: str = "balanced"
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    activation_checkpointing: str = "none"
    checkpoint_every_k: int = 1
    precision: str = "fp32"
    attention_backend: str = "best"
    loss_chunk_size: int = 0
    fused_optimizer: bool = True
    rank_order: str = "tp-cp-dp-pp"
    expandable_segments: bool = False
    script: str = ""
    compile_blocks: bool = False
    pipeline_layout: str = ""
    accumulation_dtype: str = "fp32"
    optimizer: str = "adamw"
    lora_rank: int = 0
    lora_targets: str = "attention"
    frozen_dtype: str = "same"
    environment: str = ""
    adapter_size: int = 0
    prefix_length: int = 0
    prompt_length: int = 0
    context_parallel_method: str = "gather"
    attention_window: int = 0
    attention_global_tokens: int = 0
    gc_interval: int = 0
    overlap_param_gather: bool = False
    offload_activations: bool = False
    numa_binding: bool = False
    curriculum_start_length: int = 0
    curriculum_steps: int = 0
    random_ltd_start_tokens: int = 0
    random_ltd_steps: int = 0
    gather_dtype: str = "same"
    secondary_shard_size: int = 0
    onebit_warmup_steps: int = 1000
    async_tensor_parallel: bool = False
    pack_sequences: bool = False
    fused_kernels: str = "none"
    cuda_graphs: bool = False

    def __repr__(self) -> str:
        """What makes this point again: the knobs that have another value than their default, in the order of the fields."""
        return f"TrialConfig({', '.join(f'{name}={value!r}' for name, value in self.differences(_DEFAULTS).items())})"

    @property
    def model_parallel_size(self) -> int:
        """Ranks that one replica of the model takes: TP x PP x CP."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model on `world_size` ranks, rounded down."""
        return world_size // self.model_parallel_size

    def zero_ranks(self, world_size: int) -> int:
        """Ranks with the same parameters, whose gradients are summed and whose states are divided: data x context."""
        return self.data_parallel_size(world_size) * self.context_parallel_size

    def shard_ranks(self, world_size: int) -> int:
        """Of these, the ranks that divide one copy of the parameters at stage 3."""
        return self.hsdp_shard_size or self.zero_ranks(world_size)

    def gradient_accumulation_steps(self, global_batch_size: int, world_size: int) -> int:
        """Micro-batches that each replica runs in one optimizer step, rounded down."""
        return global_batch_size // (self.micro_batch_size * max(self.data_parallel_size(world_size), 1))

    def every_value(self) -> dict[str, Value]:
        """Every knob and its value, in the order of the fields."""
        return dict(zip(KNOB_NAMES, _values_of(self), strict=True))

    def values(self) -> dict[str, Value]:
        """What is written of it: every knob and its value, those of `LATER` only where they have another than their default."""
        values = self.every_value()
        for name, default in _LATER_DEFAULTS.items():
            if values[name] == default:
                del values[name]
        return values

    def replace(self, changes: Mapping[str, Value]) -> "TrialConfig":
        """The same point with some knobs changed.

        Raises:
            UnknownNameError: a knob does not exist.
        """
        replaced = object.__new__(
            TrialConfig
        )  # a fraction of the time of dataclasses.replace: counting a space is made of this
        for put, value in zip(_PUT.values(), _values_of(self), strict=True):
            put(replaced, value)
        for name, value in changes.items():
            if name not in _PUT:
                raise UnknownNameError(name, "no knob has this name", "see `autotune space --knobs` for the knobs")
            _PUT[name](replaced, value)
        return replaced

    @property
    def hash(self) -> str:
        """16 hexadecimal digits that are the same in every process for the same values."""
        return stable_hash(self.values())

    def differences(self, other: "TrialConfig") -> dict[str, Value]:
        """The knobs of this point whose value is another in `other`."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(other, name)}


_DEFAULTS = TrialConfig()
KNOB_NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(TrialConfig))
"""The names of all knobs, in the order in which they are shown."""
LATER = frozenset({
    SCRIPT, "compile_blocks", "pipeline_layout", "accumulation_dtype", "optimizer", "lora_rank", "lora_targets", "frozen_dtype",
    "environment",
    "adapter_size", "prefix_length", "prompt_length",
    "context_parallel_method", "attention_window", "attention_global_tokens",
    "gc_interval", "overlap_param_gather", "offload_activations", "numa_binding",
    "curriculum_start_length", "curriculum_steps", "random_ltd_start_tokens", "random_ltd_steps",
    "gather_dtype", "secondary_shard_size", "onebit_warmup_steps",
    "async_tensor_parallel",
    "pack_sequences",
    "fused_kernels",
    "cuda_graphs",
})  # fmt: skip
"""Knobs that came when configurations were stored already. Where they have their default they are not written, so that what
was stored is written, and hashed, as it was before there were these knobs. A new knob belongs here."""
_LATER_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrialConfig) if field.name in LATER}
_PUT = {name: vars(TrialConfig)[name].__set__ for name in KNOB_NAMES}
"""Knob -> what writes its slot, before anybody has seen the point."""
_values_of = operator.attrgetter(*KNOB_NAMES)


def is_whole(values: Mapping[str, Any]) -> bool:
    """Whether stored values are those of every knob there is now: a row from before a knob was there lacks it."""
    return len(values) - len(LATER & values.keys()) == len(KNOB_NAMES) - len(LATER)


def stable_hash(value: Any) -> str:
    """16 hexadecimal digits of SHA-256 over canonical JSON: the same in every process and on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
