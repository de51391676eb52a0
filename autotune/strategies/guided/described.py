"""Configurations as arrays: what is predicted of each, and what tells them apart."""

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
    """What is predicted of n configurations. No figure of a trial of theirs is in it."""

    log_rate: Array
    """(n,) Logarithm of the samples/s that the equations predict, or of what else is made the most of (`Guide.value`)."""
    learned: Array
    """(n,) What earlier measurements of other jobs add to it; 0 where there are none."""
    doubt: Array
    """(n,) What is taken off it for settings that depart from the base, whose whole cost no equation counts."""
    features: Array
    """(n, f) What tells configurations apart, degrees and sizes in doublings."""
    needed: Array
    """(n,) Bytes of the fullest rank."""
    outside: Array
    """(n,) Those of them that are outside of torch's allocator."""
    tags: Array
    """(n, t) The same by tag."""
    room: Array
    """(n,) Bytes that a rank may use."""
    memory_spread: Array
    """(n,) Standard deviation of the logarithm of measured / predicted bytes."""
    kind: Index
    """(n,) Equal where bytes may be compared tag by tag: equal buckets, same side of one micro-batch a step."""
    cost: Array
    """(n,) Seconds that a trial is predicted to take; the same for all where it is not known."""
    mesh: Index
    """(n,) Equal where a trial can use the process groups of another."""

    def __len__(self) -> int:
        return len(self.log_rate)

    def part(self, places: slice) -> "Described":
        """Configurations in a row, without copying them."""
        return Described(**{item.name: getattr(self, item.name)[places] for item in fields(Described)})

    def take(self, index: Index) -> "Described":
        """The configurations of an index."""
        return Described(**{item.name: getattr(self, item.name)[index] for item in fields(Described)})


def joined(one: Described, other: Described) -> Described:
    """Both, in this order."""
    return Described(
        **{item.name: np.concatenate([getattr(one, item.name), getattr(other, item.name)]) for item in fields(Described)}
    )


class Pool(Protocol):
    """Candidates with what is predicted of them."""

    @property
    def described(self) -> Described:
        """All of them, in a fixed order."""
        ...

    def config(self, place: int) -> TrialConfig:
        """The candidate at a place of that order."""
        ...

    def places(self, configs: Sequence[TrialConfig]) -> Index:
        """Where these configurations stand; -1: they are none of the pool."""
        ...


class Pools:
    """The pools of a forecaster, each made once."""

    def __init__(self, forecaster: "Forecaster") -> None:
        self.forecaster = forecaster
        self._made: dict[str, Pool] = {}

    def of(self, candidates: Candidates) -> Pool:
        """The pool of these candidates."""
        if candidates.hash not in self._made:
            self._made[candidates.hash] = self.forecaster.pool(candidates)
        return self._made[candidates.hash]


class Forecaster(Protocol):
    """Predicts for one model on one cluster. What it says follows from its arguments and from what it was made with."""

    def pool(self, candidates: Candidates) -> Pool:
        """The candidates, or those of them that are predicted to be worth a trial."""
        ...

    def after(self, history: Sequence[TrialRecord]) -> "Forecaster":
        """One that knows the coefficients of its equations better after these trials, of the same job; or this one."""
        ...

    def around(self, best: TrialConfig, log_rate: float) -> Sequence[TrialConfig]:
        """Configurations that the pool leaves out and that may beat the best, which was measured at that rate."""
        ...

    def describe(self, configs: Sequence[TrialConfig]) -> Described:
        """Configurations that need not be of the pool; there may be none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What strategies that predict need beside the score."""

    forecaster: Forecaster
    value: Callable[[TrialRecord], float]
    """What the forecaster predicts, positive, also of trials that may not win; 0: not measured."""
