"""One configuration: a value for every knob, with a canonical stored form and a hash."""

import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.errors import UnknownNameError
from search_spaces.knob import Value, knobs_of
from search_spaces.knobs.computation import ComputationKnobs, ProcessKnobs
from search_spaces.knobs.parallelism import ParallelismKnobs
from search_spaces.knobs.training import TrainingKnobs
from search_spaces.knobs.zero import OffloadKnobs, ZeroKnobs
from search_spaces.plugins import PluginGroup, load_plugins

SCRIPT = "script"
"""The knob that holds the values of a user's script's own knobs."""


_PLUGIN_KNOBS: tuple[type[Any], ...] = tuple(load_plugins(PluginGroup.KNOBS).values())


def _ordered_by_number(config: Any) -> Any:
    """Order the fields of a dataclass by their knobs' numbers, because plain data has them in the order of the fields."""
    config.__dataclass_fields__ = {name: config.__dataclass_fields__[name] for name in knobs_of(config)}
    return config


@_ordered_by_number
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrialConfig(
    ZeroKnobs,
    OffloadKnobs,
    ParallelismKnobs,
    ComputationKnobs,
    ProcessKnobs,
    TrainingKnobs,
    *_PLUGIN_KNOBS,  # type: ignore[misc]
):
    """A value for every knob; the base classes declare the knobs (`search_spaces.knob.Knob`).

    Sizes of buckets are elements, not bytes. Data-parallel degree and gradient accumulation are derived:
    see `data_parallel_size` and `gradient_accumulation_steps`.
    """

    def __repr__(self) -> str:
        """An expression for this configuration: the knobs that differ from their default, ordered by number."""
        return f"TrialConfig({', '.join(f'{name}={value!r}' for name, value in self.differences(_DEFAULTS).items())})"

    @property
    def model_parallel_size(self) -> int:
        """Ranks that one replica of the model takes: TP x PP x CP."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def expert_slices(self) -> int:
        """Ranks that divide each expert."""
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    @property
    def places_experts_apart(self) -> bool:
        """Whether experts are divided over other ranks than the rest of the model."""
        return self.expert_parallel_size > 1 or self.expert_slices < self.tensor_parallel_size

    def expert_ranks(self, world_size: int) -> int:
        """Ranks with the same slice of experts, which may divide the experts, rounded down."""
        return self.zero_ranks(world_size) * self.tensor_parallel_size // self.expert_slices

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model on `world_size` ranks, rounded down."""
        return world_size // self.model_parallel_size

    def zero_ranks(self, world_size: int) -> int:
        """Ranks with the same parameters, which reduce gradients together and shard the states: data x context."""
        return self.data_parallel_size(world_size) * self.context_parallel_size

    def shard_ranks(self, world_size: int) -> int:
        """Ranks of these over which parameters are sharded at stage 3."""
        return self.hsdp_shard_size or self.zero_ranks(world_size)

    def gradient_accumulation_steps(self, global_batch_size: int, world_size: int) -> int:
        """Micro-batches that each replica runs in one optimizer step, rounded down."""
        return global_batch_size // (self.micro_batch_size * max(self.data_parallel_size(world_size), 1))

    def every_value(self) -> dict[str, Value]:
        """Every knob and its value, ordered by number."""
        return dict(zip(KNOB_NAMES, _values_of(self), strict=True))

    def values(self) -> dict[str, Value]:
        """The stored form: every knob and its value, except later ones (from number 32) at their default."""
        values = self.every_value()
        for name, default in _LATER_DEFAULTS.items():
            if values[name] == default:
                del values[name]
        return values

    def replace(self, changes: Mapping[str, Value]) -> "TrialConfig":
        """A copy with some knobs changed.

        Raises:
            UnknownNameError: a knob does not exist.
        """
        # Much faster than dataclasses.replace, which would dominate the time of counting a space.
        replaced = object.__new__(TrialConfig)
        for setter, value in zip(_SETTERS.values(), _values_of(self), strict=True):
            setter(replaced, value)
        for name, value in changes.items():
            if name not in _SETTERS:
                raise UnknownNameError(name, "no knob has this name", "see `autotune space --knobs` for the knobs")
            _SETTERS[name](replaced, value)
        return replaced

    @property
    def hash(self) -> str:
        """16 hexadecimal digits, the same in every process for the same values."""
        return stable_hash(self.values())

    def differences(self, other: "TrialConfig") -> dict[str, Value]:
        """The knobs whose value differs in `other`, with this configuration's values."""
        return {name: getattr(self, name) for name in KNOB_NAMES if getattr(self, name) != getattr(other, name)}


_KNOBS = knobs_of(TrialConfig)
KNOB_NAMES: tuple[str, ...] = tuple(_KNOBS)
"""The names of all knobs, ordered by number."""
_DEFAULTS = TrialConfig()
# Knobs below number 32 are in every stored configuration. Later ones are stored only if they differ from their default.
_LATER_DEFAULTS = {item.name: item.default for item in _KNOBS.values() if item.number >= 32}
_SETTERS = {name: getattr(TrialConfig, name).__set__ for name in KNOB_NAMES}
"""Knob -> setter of its slot, to initialise a new frozen instance."""
_values_of = operator.attrgetter(*KNOB_NAMES)


def stable_hash(value: Any) -> str:
    """16 hexadecimal digits of SHA-256 over canonical JSON: the same in every process and on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
