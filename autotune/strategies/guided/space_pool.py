"""The candidates of a search space as arrays: those predicted to be fastest among those that may fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.cases.grid import Codes, ConfigGrid, KnobRows
from autotune.prediction.cases.grid_cases import GridCases, numbers
from autotune.prediction.equations.cases import Cases
from autotune.prediction.fitting.likeness import Numbers
from autotune.prediction.planning.memory_fit import probability_within
from autotune.prediction.planning.scan import uniform_parts, without_buckets
from autotune.strategies.guided.described import Array, Described, Index, joined
from search_spaces.canonical import SEARCH_ORDER
from search_spaces.errors import SpaceTooLargeError
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

LARGEST_POOL = 200_000
"""Number of candidates kept: the fastest predicted ones that may fit; all of a smaller space."""
WHOLE = 20_000
"""Largest space in which knobs that only split communication are searched like all others: `choose` considers this many at
once. In a larger space they are tuned around the best."""
MOST_PREDICTED = 10_000_000
"""Number of configurations predicted before a space is refused as too large: about 30 seconds."""

Describe = Callable[[Cases, Numbers], Described]
"""Makes the predictions for cases; the numbers are those of knobs that no equation uses."""


@dataclass(slots=True)
class _KeptCandidates:
    """Kept candidates of one precision and one attention kernel."""

    grid: ConfigGrid
    cases: GridCases[KnobRows]
    codes: Codes
    order: Array
    """Key by which the best are kept; lower is better."""


class SpacePool:
    """The candidates that `describe` predicts together.

    In a space of more than `WHOLE` configurations, knobs that only split communication stay fixed (`without_buckets`): they are
    tuned around the best later.
    """

    def __init__(
        self, space: SearchSpace, make_cases: Callable[[SearchSpace, ConfigGrid], GridCases[KnobRows]], order: "Order"
    ) -> None:
        """Raises SpaceTooLargeError if the space has more than `MOST_PREDICTED` configurations."""
        self._parts = _kept(space, make_cases, order)
        self._firsts = np.cumsum([0, *(len(part.codes) for part in self._parts)])
        self._at = {
            (number, row.tobytes()): first + index
            for number, (part, first) in enumerate(zip(self._parts, self._firsts, strict=False))
            for index, row in enumerate(part.codes)
        }

    def describe(self, describe: Describe) -> Described:
        """Predictions for all candidates, in a fixed order."""
        described_parts = [describe(part.cases.at(part.codes), _numbers(part)) for part in self._parts]
        described = described_parts[0]
        for more in described_parts[1:]:
            described = joined(described, more)
        return described

    def config(self, position: int) -> TrialConfig:
        """The candidate at a position."""
        number = int(np.searchsorted(self._firsts, position, side="right")) - 1
        part = self._parts[number]
        return part.grid.config_of(part.codes[position - self._firsts[number]])

    def places(self, configs: Sequence[TrialConfig]) -> Index:
        """Positions of configurations; -1: not in the pool."""
        return np.array([self._place(config) for config in configs], dtype=np.int64)

    def _place(self, config: TrialConfig) -> int:
        for number, part in enumerate(self._parts):
            codes = _codes(part.grid, config)
            if codes is not None and (position := self._at.get((number, codes.tobytes()))) is not None:
                return int(position)
        return -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Quick predictions for candidates, used to keep the best of a large space."""

    seconds: Callable[[Cases], Array]
    margin: Callable[[Cases], Array]
    """Standard deviations between predicted and available memory."""


def _kept(
    space: SearchSpace, make_cases: Callable[[SearchSpace, ConfigGrid], GridCases[KnobRows]], order: Order
) -> list[_KeptCandidates]:
    parts: list[_KeptCandidates] = []
    predicted = 0
    for uniform in uniform_parts(space if space.count() <= WHOLE else without_buckets(space)):
        grid = ConfigGrid(uniform)
        part = _KeptCandidates(grid, make_cases(uniform, grid), np.empty((0, len(SEARCH_ORDER)), dtype=np.int16), np.empty(0))
        parts.append(part)
        for rows in grid.blocks():
            predicted += rows.count * grid.sides.count
            if predicted > MOST_PREDICTED:
                problem = f"it has more than {MOST_PREDICTED:,} configurations, and guided search predicts each of them"
                raise SpaceTooLargeError("space", problem, "pin some knobs, choose a smaller space, or use --strategy tpe")
            cases, shape = part.cases.of(rows), (rows.count, grid.sides.count)
            seconds = np.broadcast_to(order.seconds(cases), shape).ravel()
            fits = probability_within(np.broadcast_to(order.margin(cases), shape).ravel())
            # Candidates that hardly fit come last and are kept if there is space for all.
            ranked = np.where(fits < 0.005, 1e12 * (2 - fits), seconds)
            part.codes = np.concatenate([part.codes, grid.codes_at(rows, np.arange(len(ranked)))])
            part.order = np.concatenate([part.order, ranked])
            if sum(len(pool_part.codes) for pool_part in parts) > 2 * LARGEST_POOL:
                _prune(parts)
    _prune(parts)
    return [part for part in parts if len(part.codes)]


def _prune(parts: Sequence[_KeptCandidates]) -> None:
    every = np.concatenate([part.order for part in parts])
    if len(every) <= LARGEST_POOL:
        return
    last = np.partition(every, LARGEST_POOL - 1)[LARGEST_POOL - 1]
    for part in parts:
        mask = (part.order <= last) & (part.order < 1e12)
        part.codes, part.order = part.codes[mask], part.order[mask]


def _numbers(part: _KeptCandidates) -> Numbers:
    return lambda name, meaning: numbers(part.grid, name, part.codes[:, SEARCH_ORDER.index(name)], meaning)


def _codes(grid: ConfigGrid, config: TrialConfig) -> Codes | None:
    """The codes of a configuration; None: the grid lacks one of its values."""
    codes = []
    for name, values in zip(SEARCH_ORDER, grid.values, strict=True):
        value = getattr(config, name)
        if value not in values:
            return None
        codes.append(values.index(value))
    return np.array(codes, dtype=np.int16)
