"""The candidates of a search space, as arrays: those that are predicted to be fastest among those that may fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.objective.normal import probability_below
from autotune.prediction.cases.grid import Codes, Grid
from autotune.prediction.cases.grid_cases import GridCases, numbers
from autotune.prediction.equations.cases import Cases
from autotune.prediction.fitting.knob_features import Numbers
from autotune.prediction.planning.scan import uniform_parts, without_buckets
from autotune.strategies.guided.described import Array, Described, Index, joined
from search_spaces.canonical import SEARCH_ORDER
from search_spaces.errors import SpaceTooLargeError
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig, Value

LARGEST_POOL = 200_000
"""Candidates that are kept, the fastest predicted of those that may fit; all of a smaller space."""
WHOLE = 20_000
"""Configurations of a space up to which knobs that only cut communication are candidates like all others: `choose` looks at
so many at once. In a larger space they are set around the best."""
MOST_PREDICTED = 10_000_000
"""Configurations that are looked at before a space is refused as too large: some 30 seconds."""
HOPELESS = 1e-4
"""Chance to fit below which a candidate of a large space is left out."""

Describe = Callable[[Cases, Numbers], Described]
"""Makes what is predicted of cases; the numbers are those of knobs that no equation looks at."""


@dataclass(slots=True)
class _Part:
    """Kept candidates of one precision and one attention kernel."""

    grid: Grid
    cases: GridCases
    codes: Codes
    order: Array
    """What the best are kept by, lower being better."""


class SpacePool:
    """The candidates that `describe` can be asked about at once.

    In a space of more than `WHOLE` configurations knobs that only cut communication stand where they are (`without_buckets`):
    they are set around the best, later.
    """

    def __init__(self, space: SearchSpace, make_cases: Callable[[SearchSpace, Grid], GridCases], order: "Order") -> None:
        """Raises SpaceTooLargeError where the space has more than `MOST_PREDICTED` configurations."""
        self._parts = _kept(space, make_cases, order)
        self._firsts = np.cumsum([0, *(len(part.codes) for part in self._parts)])
        self._at = {
            (number, row.tobytes()): first + place
            for number, (part, first) in enumerate(zip(self._parts, self._firsts, strict=False))
            for place, row in enumerate(part.codes)
        }

    def describe(self, describe: Describe) -> Described:
        """All candidates, in a fixed order."""
        found = [describe(part.cases.at(part.codes), _numbers(part)) for part in self._parts]
        described = found[0]
        for more in found[1:]:
            described = joined(described, more)
        return described

    def config(self, place: int) -> TrialConfig:
        """The candidate at a place."""
        number = int(np.searchsorted(self._firsts, place, side="right")) - 1
        part = self._parts[number]
        return part.grid.config_of(part.codes[place - self._firsts[number]])

    def places(self, configs: Sequence[TrialConfig]) -> Index:
        """Where configurations stand; -1: nowhere."""
        return np.array([self._place(config) for config in configs], dtype=np.int64)

    def _place(self, config: TrialConfig) -> int:
        for number, part in enumerate(self._parts):
            codes = _codes(part.grid, config)
            if codes is not None and (place := self._at.get((number, codes.tobytes()))) is not None:
                return int(place)
        return -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is predicted of candidates at first sight, to keep the best of a large space."""

    seconds: Callable[[Cases], Array]
    margin: Callable[[Cases], Array]
    """Standard deviations of memory between what is predicted and what there is."""


def _kept(space: SearchSpace, make_cases: Callable[[SearchSpace, Grid], GridCases], order: Order) -> list[_Part]:
    parts: list[_Part] = []
    looked_at = 0
    for uniform in uniform_parts(space if space.count() <= WHOLE else without_buckets(space)):
        grid = Grid(uniform)
        part = _Part(grid, make_cases(uniform, grid), np.empty((0, len(SEARCH_ORDER)), dtype=np.int16), np.empty(0))
        parts.append(part)
        for rows in grid.blocks():
            looked_at += rows.count * grid.sides.count
            if looked_at > MOST_PREDICTED:
                problem = f"it has more than {MOST_PREDICTED:,} configurations, and guided search predicts each of them"
                raise SpaceTooLargeError("space", problem, "pin some knobs, choose a smaller space, or use --strategy tpe")
            cases, shape = part.cases.of(rows), (rows.count, grid.sides.count)
            seconds = np.broadcast_to(order.seconds(cases), shape).ravel()
            fits = probability_below(np.broadcast_to(order.margin(cases), shape).ravel())
            # Those that hardly fit come last, and are kept where there is room for all.
            ranked = np.where(fits < HOPELESS, 1e12 * (2 - fits), seconds)
            part.codes = np.concatenate([part.codes, grid.codes_at(rows, np.arange(len(ranked)))])
            part.order = np.concatenate([part.order, ranked])
            if sum(len(each.codes) for each in parts) > 2 * LARGEST_POOL:
                _prune(parts)
    _prune(parts)
    return [part for part in parts if len(part.codes)]


def _prune(parts: Sequence[_Part]) -> None:
    every = np.concatenate([part.order for part in parts])
    if len(every) <= LARGEST_POOL:
        return
    last = np.partition(every, LARGEST_POOL - 1)[LARGEST_POOL - 1]
    for part in parts:
        kept = (part.order <= last) & (part.order < 1e12)
        part.codes, part.order = part.codes[kept], part.order[kept]


def _numbers(part: _Part) -> Numbers:
    def told(name: str, meaning: Callable[[Value], float]) -> Array:
        return numbers(part.grid, name, part.codes[:, SEARCH_ORDER.index(name)], meaning)

    return told


def _codes(grid: Grid, config: TrialConfig) -> Codes | None:
    """The codes of a configuration; None: the grid has not all of its values."""
    found = []
    for name, values in zip(SEARCH_ORDER, grid.values, strict=True):
        value = getattr(config, name)
        if value not in values:
            return None
        found.append(values.index(value))
    return np.array(found, dtype=np.int16)
