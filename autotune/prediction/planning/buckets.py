"""Buckets of the best configurations: each knob in turn at the value with which each configuration does best."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.step import predict
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.room import Room
from autotune.prediction.planning.scan import BUCKETS, Leader
from search_spaces.knobs import KNOBS
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig, Value

FIELDS = {
    "reduce_bucket_size": "reduce_bucket", "prefetch_bucket_size": "prefetch_bucket",
    "param_persistence_threshold": "persistence", "max_live_parameters": "max_live", "overlap_comm": "overlap",
    "overlap_param_gather": "late_gather", "async_tensor_parallel": "async_tensor",
    "loss_chunk_size": "loss_chunk", "allgather_bucket_size": "allgather_bucket",
}  # fmt: skip
"""Knob -> the field of `Layouts` that it is."""
WORTH = 1e-3
"""Relative gain below which a bucket stays as it is, unless it saves memory: less than the equations tell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What another value of a bucket would do to one configuration, all else as it is."""

    seconds: float
    memory: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A configuration with its buckets set."""

    leader: Leader
    """As it was ranked."""
    config: TrialConfig
    seconds: float
    memory: float
    settings: dict[str, dict[Value, Setting]]
    """Bucket -> value -> what it does, of the buckets that had several values and matter here."""


def tuned(question: Question, space: SearchSpace, room: Room, leaders: Sequence[Leader], by_memory: bool) -> list[Tuned]:
    """The leaders with their buckets set, the best first.

    1. For one bucket after the other: predict all leaders with each of its values, where it matters at all.
    2. Each takes the value that fits and is best; the value that it has, where the gain is not worth it; among values that
       are as good, the one that needs least memory.
    """
    work = _Work.of(question, space, leaders)
    for name in BUCKETS:
        if len(space.domains.get(name, ())) > 1:
            work.settle(name, room, by_memory)
    return in_order(work.results(), by_memory)


def in_order(found: Sequence[Tuned], by_memory: bool) -> list[Tuned]:
    """The best first."""
    return sorted(found, key=lambda item: (item.memory, item.seconds) if by_memory else (item.seconds, item.memory))


@dataclass(slots=True)
class _Work:
    """All leaders at once."""

    question: Question
    space: SearchSpace
    leaders: Sequence[Leader]
    groups: list[tuple[NDArray[np.int64], Cases]]
    """Places of leaders that compute alike, and their cases."""
    chosen: list[dict[str, Value]]
    settings: list[dict[str, dict[Value, Setting]]]
    seconds: Array
    memory: Array

    @staticmethod
    def of(question: Question, space: SearchSpace, leaders: Sequence[Leader]) -> "_Work":
        """Nothing is set yet."""
        alike: dict[tuple[str, str], list[int]] = {}
        for place, leader in enumerate(leaders):
            alike.setdefault((leader.config.precision, leader.config.attention_backend), []).append(place)
        groups = []
        for places in alike.values():
            configs = [leaders[place].config for place in places]
            cases = cases_of(question.model, question.cluster, question.workload, configs, question.engine)
            groups.append((np.array(places), cases))
        return _Work(
            question, space, leaders, groups, [{} for _ in leaders], [{} for _ in leaders],
            np.array([leader.seconds for leader in leaders]), np.array([leader.memory for leader in leaders]),
        )  # fmt: skip

    def settle(self, name: str, room: Room, by_memory: bool) -> None:
        """Set one bucket of all leaders."""
        values = [value for value in self.space.domains[name] if self._honours(name, value)]
        condition, context = KNOBS[name].condition, self.space.context
        for group, (places, cases) in enumerate(self.groups):
            matters = np.array([condition is None or condition.holds(self.leaders[at].config, context) for at in places])
            tried = [self._tried(cases, name, value, room) for value in values]
            seconds, memory, fits = (np.array([part[field] for part in tried]) for field in range(3))
            now, other = (self.memory, self.seconds) if by_memory else (self.seconds, self.memory)
            first, second = (memory, seconds) if by_memory else (seconds, memory)
            best = _best(first, second, fits, now[places], other[places])
            held = getattr(cases.layouts, FIELDS[name])
            numbers = np.array([float(value) for value in values])
            take = matters & (best >= 0)
            moved = np.where(take, numbers[np.maximum(best, 0)], held)
            self.groups[group] = (places, _with(cases, name, moved))
            for column, place in enumerate(places):
                if matters[column]:
                    self.settings[place][name] = {
                        value: Setting(
                            seconds=float(seconds[row, column]), memory=float(memory[row, column]), fits=bool(fits[row, column])
                        )
                        for row, value in enumerate(values)
                    }
                if take[column]:
                    row = int(best[column])
                    self.chosen[place][name] = values[row]
                    self.seconds[place], self.memory[place] = seconds[row, column], memory[row, column]

    def results(self) -> list[Tuned]:
        """Every leader as it is now."""
        return [
            Tuned(
                leader=leader,
                config=self.space.canonical(leader.config.replace(self.chosen[place])),
                seconds=float(self.seconds[place]),
                memory=float(self.memory[place]),
                settings=self.settings[place],
            )
            for place, leader in enumerate(self.leaders)
        ]

    def _honours(self, name: str, value: Value) -> bool:
        return self.space.capability is None or self.space.capability.honours(name, value)

    def _tried(self, cases: Cases, name: str, value: Value, room: Room) -> tuple[Array, Array, NDArray[np.bool_]]:
        count = len(cases)
        prediction = predict(_with(cases, name, np.full(count, float(value))), self.question.rates)
        seconds, memory = np.broadcast_to(prediction.seconds, count), np.broadcast_to(prediction.memory.needed, count)
        return seconds, memory, room.holds(memory, np.broadcast_to(prediction.memory.host, count))


def _best(first: Array, second: Array, fits: NDArray[np.bool_], now: Array, other: Array) -> NDArray[np.int64]:
    """For each column the row that is best; -1: none is better than what is there now."""
    ranked = np.where(fits, first, np.inf)
    least = ranked.min(axis=0)
    alike = ranked <= least * (1 + WORTH)
    row = np.where(alike, second, np.inf).argmin(axis=0)
    columns = np.arange(first.shape[1])
    gains = ranked[row, columns] < now * (1 - WORTH)
    saves = (ranked[row, columns] <= now * (1 + WORTH)) & (second[row, columns] < other * (1 - WORTH))
    return np.where(np.isfinite(least) & (gains | saves), row, -1)


def _with(cases: Cases, name: str, numbers: Array) -> Cases:
    return dataclasses.replace(cases, layouts=dataclasses.replace(cases.layouts, **{FIELDS[name]: numbers}))
