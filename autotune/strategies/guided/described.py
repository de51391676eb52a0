"""Configurations as arrays: their predictions and the features that distinguish them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.strategies.strategy import Candidates
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Described:
    """Predictions for n configurations. Contains no result of a trial of these configurations."""

    log_rate: Array
    """(n,) Logarithm of the samples/s that the equations predict, or of another maximised value (`Guide.value`)."""
    learned: Array
    """(n,) Correction learned from earlier jobs' measurements; 0 without any."""
    penalty: Array
    """(n,) Penalty for settings that depart from the base, whose full cost no equation counts."""
    features: Array
    """(n, f) Features that distinguish configurations; degrees and sizes in doublings."""
    needed: Array
    """(n,) Bytes of the fullest rank."""
    outside: Array
    """(n,) The part of these bytes outside of torch's allocator."""
    tags: Array
    """(n, t) Bytes by tag."""
    room: Array
    """(n,) Bytes that a rank may use."""
    memory_spread: Array
    """(n,) Standard deviation of the logarithm of measured / predicted bytes."""
    kind: Index
    """(n,) Equal if bytes are comparable tag by tag: equal buckets, same side of one micro-batch per step."""
    cost: Array
    """(n,) Predicted seconds of a trial; the same for all if unknown."""
    mesh: Index
    """(n,) Equal if a trial can reuse the process groups of the other."""

    def __len__(self) -> int:
        return len(self.log_rate)

    def part(self, places: slice) -> "Described":
        """A contiguous range of configurations, without a copy."""
        return Described(**{item.name: getattr(self, item.name)[places] for item in fields(Described)})

    def take(self, index: Index) -> "Described":
        """The configurations at these indices."""
        return Described(**{item.name: getattr(self, item.name)[index] for item in fields(Described)})


def joined(first: Described, second: Described) -> Described:
    """Concatenate both, in this order."""
    return Described(
        **{item.name: np.concatenate([getattr(first, item.name), getattr(second, item.name)]) for item in fields(Described)}
    )


class CandidatePool(Protocol):
    """Candidates with their predictions."""

    @property
    def described(self) -> Described:
        """All of them, in a fixed order."""
        ...

    def config(self, position: int) -> TrialConfig:
        """The candidate at a position in that order."""
        ...

    def places(self, configs: Sequence[TrialConfig]) -> Index:
        """Positions of these configurations; -1: not in the pool."""
        ...


class CandidatePools:
    """The pools of a forecaster, each created once."""

    def __init__(self, forecaster: "Forecaster") -> None:
        self.forecaster = forecaster
        self._made: dict[str, CandidatePool] = {}

    def of(self, candidates: Candidates) -> CandidatePool:
        """The pool of these candidates."""
        if candidates.hash not in self._made:
            self._made[candidates.hash] = self.forecaster.pool(candidates)
        return self._made[candidates.hash]


class Forecaster(Protocol):
    """Predicts for one model on one cluster. Results depend only on the arguments and on the constructor's arguments."""

    def pool(self, candidates: Candidates) -> CandidatePool:
        """The candidates, or those that are predicted to be worth a trial."""
        ...

    def after(self, history: Sequence[TrialRecord]) -> "Forecaster":
        """A forecaster with coefficients refined by these trials of the same job; or this one."""
        ...

    def around(self, best: TrialConfig, log_rate: float) -> Sequence[TrialConfig]:
        """Configurations outside the pool that may beat the best, which was measured at that rate."""
        ...

    def describe(self, configs: Sequence[TrialConfig]) -> Described:
        """Predictions for any configurations, in the pool or not; there may be none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What predicting strategies need besides the score."""

    forecaster: Forecaster
    value: Callable[[TrialRecord], float]
    """What the forecaster predicts: positive, also for trials that cannot win; 0: not measured."""
