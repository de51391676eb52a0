"""Bucket sizes of the best configurations: coordinate-wise, each knob is set to the value best for each configuration."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.step import predict
from autotune.prediction.planning.estimate import alike
from autotune.prediction.planning.memory_fit import MemoryLimits
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.scan import BUCKETS
from autotune.prediction.planning.scan_results import Leader
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

TRAFFIC = (
    "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
    "overlap_comm", "overlap_param_gather",
)  # fmt: skip
"""Buckets of gradients and parameters, which do nothing where these stay on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSetting:
    """The predicted effect of another bucket value on one configuration, all else equal."""

    seconds: float
    memory: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A configuration with its bucket sizes set."""

    leader: Leader
    """As ranked before."""
    config: TrialConfig
    seconds: float
    """Seconds of a step."""
    memory: float
    """Bytes of the fullest rank, without those that the allocator reserves beyond use."""
    settings: dict[str, dict[Value, BucketSetting]]
    """Bucket -> value -> its effect, for the buckets that have several values and matter here."""

    def document(self) -> dict[str, Any]:
        """The JSON representation."""
        return {"config": self.config.values(), "step_seconds": self.seconds, "peak_memory_bytes": self.memory}


def tuned(
    question: Question, space: SearchSpace, limits: MemoryLimits, leaders: Sequence[Leader], by_memory: bool, slowest: float
) -> list[Tuned]:
    """The leaders with their bucket sizes set, best first.

    1. For each bucket in turn: predict all leaders with each of its values, where it matters at all.
    2. Each leader takes the best value that fits and is not slower than `slowest` seconds; it keeps its value if the gain is
       below `WORTH`; among equally good values, it takes the one that needs the least memory.
    """
    work = _Work.of(question, space, leaders)
    for name in BUCKETS:
        if len(space.domains.get(name, ())) > 1:
            work.set_bucket(name, limits, by_memory, slowest)
    return in_order(work.results(), by_memory)


def in_order(candidates: Sequence[Tuned], by_memory: bool) -> list[Tuned]:
    """Sort, best first."""
    return sorted(candidates, key=lambda item: (item.memory, item.seconds) if by_memory else (item.seconds, item.memory))


@dataclass(slots=True)
class _Work:
    """The state for all leaders."""

    question: Question
    space: SearchSpace
    leaders: Sequence[Leader]
    groups: list[tuple[NDArray[np.int64], Cases]]
    """Positions of leaders with the same precision and attention kernel, and their cases."""
    chosen: list[dict[str, Value]]
    settings: list[dict[str, dict[Value, BucketSetting]]]
    seconds: Array
    memory: Array

    @staticmethod
    def of(question: Question, space: SearchSpace, leaders: Sequence[Leader]) -> "_Work":
        """The initial state."""
        configs = [leader.config for leader in leaders]
        groups = [(np.array(places), cases) for places, cases in alike(question, configs)]
        return _Work(
            question, space, leaders, groups, [{} for _ in leaders], [{} for _ in leaders],
            np.array([leader.seconds for leader in leaders]), np.array([leader.memory for leader in leaders]),
        )  # fmt: skip

    def set_bucket(self, name: str, limits: MemoryLimits, by_memory: bool, slowest: float) -> None:
        """Set one bucket for all leaders."""
        capability = self.space.capability
        values = [value for value in self.space.domains[name] if capability is None or capability.honours(name, value)]
        numbers = np.array([float(value) for value in values])
        condition, context = KNOBS[name].condition, self.space.context
        for group, (everyone, cases) in enumerate(self.groups):
            matters = [
                (condition is None or condition.holds(self.leaders[at].config, context))
                and (name not in TRAFFIC or has_traffic(self.leaders[at].config, context.world_size))
                for at in everyone
            ]
            rows = np.flatnonzero(matters)
            if not len(rows) or not values:
                continue
            places = everyone[rows]
            seconds, memory, fits = self._predict_values(cases.take(rows), name, numbers, limits)
            now, other = (self.memory, self.seconds) if by_memory else (self.seconds, self.memory)
            first, second = (memory, seconds) if by_memory else (seconds, memory)
            best = _best(first, second, fits & (seconds <= slowest), now[places], other[places])
            moved = np.broadcast_to(getattr(cases.layouts, name), len(everyone)).copy()
            moved[rows] = np.where(best >= 0, numbers[np.maximum(best, 0)], moved[rows])
            self.groups[group] = (everyone, _with(cases, name, moved))
            for column, index in enumerate(places):
                self.settings[index][name] = {
                    value: BucketSetting(
                        seconds=float(seconds[row, column]), memory=float(memory[row, column]), fits=bool(fits[row, column])
                    )
                    for row, value in enumerate(values)
                }
                if best[column] >= 0:
                    row = int(best[column])
                    self.chosen[index][name] = values[row]
                    self.seconds[index], self.memory[index] = seconds[row, column], memory[row, column]

    def results(self) -> list[Tuned]:
        """Every leader in its current state."""
        return [
            Tuned(
                leader=leader,
                config=self.space.canonical(leader.config.replace(self.chosen[index])),
                seconds=float(self.seconds[index]),
                memory=float(self.memory[index]),
                settings=self.settings[index],
            )
            for index, leader in enumerate(self.leaders)
        ]

    def _predict_values(
        self, cases: Cases, name: str, numbers: Array, limits: MemoryLimits
    ) -> tuple[Array, Array, NDArray[np.bool_]]:
        """(values, cases): seconds, memory and whether it fits, all predicted at once."""
        shape = len(numbers), len(cases)
        again = cases.take(np.tile(np.arange(shape[1]), shape[0]))
        prediction = predict(_with(again, name, np.repeat(numbers, shape[1])), self.question.rates)
        usage = prediction.memory
        seconds, memory, host = (
            np.broadcast_to(column, shape[0] * shape[1]) for column in (prediction.seconds, usage.needed, usage.host)
        )
        return seconds.reshape(shape), memory.reshape(shape), limits.holds(memory, host).reshape(shape)


def has_traffic(config: TrialConfig, world_size: int) -> bool:
    """Whether gradients or parameters are moved: between ranks, or to and from the host."""
    return config.zero_ranks(world_size) > 1 or config.offload_optimizer != "none" or config.offload_param != "none"


def _best(first: Array, second: Array, fits: NDArray[np.bool_], now: Array, other: Array) -> NDArray[np.int64]:
    """For each column the best row; -1: no row is better than the current value."""
    ranked = np.where(fits, first, np.inf)
    least = ranked.min(axis=0)
    # Relative gain below which a bucket keeps its value unless another saves memory: the equations cannot resolve less.
    worth = 1e-3
    as_good = ranked <= least * (1 + worth)
    row = np.where(as_good, second, np.inf).argmin(axis=0)
    columns = np.arange(first.shape[1])
    gains = ranked[row, columns] < now * (1 - worth)
    saves = (ranked[row, columns] <= now * (1 + worth)) & (second[row, columns] < other * (1 - worth))
    return np.where(np.isfinite(least) & (gains | saves), row, -1)


def _with(cases: Cases, name: str, numbers: Array) -> Cases:
    return dataclasses.replace(cases, layouts=dataclasses.replace(cases.layouts, **{name: numbers}))
