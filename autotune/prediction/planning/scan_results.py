"""What a scan has found: the best configurations, and the best result for each value of each knob."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.prediction.cases.grid import Codes, Index
from autotune.prediction.cases.grid_cases import CaseProduct, Mask, Products
from autotune.prediction.equations.cases import Array
from search_spaces.canonical import SEARCH_ORDER
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

KEPT = 1000
"""Number of configurations whose buckets are set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """One of the best configurations, before its buckets are set."""

    config: TrialConfig
    seconds: float
    """Seconds of a step."""
    memory: float
    """Bytes of the fullest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtBest:
    """The best result for one value of one knob, over all values of the others."""

    leader: Leader | None
    """The best with the value; None: none fits, or all that fit are too slow."""
    needed: float
    """If nothing with the value fits, the least bytes with it."""
    fits: bool
    """Whether any configuration with the value fits, however slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpacePart:
    """A part of a space of which the best are kept."""

    values: Mapping[str, frozenset[Value]]
    """Knob -> its values in the part; knobs that are not named have any value."""
    most: int
    """Number kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """The result of a scan."""

    leaders: tuple[Leader, ...]
    """Best first, at most `KEPT`. Of equal ones, the first in the order of the space."""
    apart: tuple[tuple[Leader, ...], ...]
    """The same for each part that was asked for."""
    count: int
    """Number of configurations."""
    fitting: int
    """Number found to fit: those that a lower bound of their time excludes are not counted."""
    fastest: float
    """Seconds of the fastest step that fits; infinite: none fits."""
    least: float
    """If nothing fits, the least bytes of any configuration."""
    at_best: dict[str, dict[Value, AtBest]]
    """Knob -> value -> its best result, for the knobs with several values."""
    slowest: float
    """Seconds of the slowest step that may lead; infinite: the rank is by time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBlock:
    """Predictions for a product; the arrays have its shape, infinite where no configuration is legal."""

    products: Products
    product: CaseProduct
    seconds: Array
    """Infinite where it does not fit."""
    memory: Array
    fits: Mask
    leads: Mask
    """Configurations that fit and are fast enough."""


@dataclass(slots=True)
class _ValueResult:
    """Results so far for one value of one knob."""

    least: float = np.inf
    """Seconds or bytes of the best."""
    needed: float = np.inf
    fits: bool = False
    best: tuple[Products, Codes, float, float] | None = None
    """Its space, its codes, its seconds and bytes."""


@dataclass(slots=True, kw_only=True)
class ScanResults:
    """Results so far."""

    slowest: float | None
    """Seconds, if configurations that take no longer are ranked by memory; None: all are, by time."""
    compared: frozenset[str]
    """The knobs of which each value is compared."""
    apart: Sequence[SpacePart] = ()
    count: int = 0
    fitting: int = 0
    fastest: float = np.inf
    least: float = np.inf
    _values: dict[str, dict[Value, _ValueResult]] = field(default_factory=dict)
    _best: list["_BestConfigs"] = field(default_factory=list)

    def __post_init__(self) -> None:
        by_memory = self.slowest is not None
        self._best = [_BestConfigs(by_memory, KEPT), *(_BestConfigs(by_memory, part.most) for part in self.apart)]

    def add(self, block: PredictionBlock) -> None:
        """Add predictions."""
        self.fitting += int(np.count_nonzero(block.fits))
        self.least = min(self.least, float(block.memory.min()))
        ranked = np.where(block.leads, block.seconds if self.slowest is None else block.memory, np.inf)
        self.fastest = min(self.fastest, float(np.where(block.leads, block.seconds, np.inf).min()))
        for axis in range(ranked.ndim):
            self._compare(block, ranked, axis)
        if not np.isfinite(ranked.min()):
            return
        everywhere = tuple(np.arange(count) for count in ranked.shape)
        self._best[0].add(block, ranked, everywhere)
        for best, inside in zip(self._best[1:], _within(block.products, block.product, self.apart), strict=True):
            within = tuple(np.flatnonzero(mask) for mask in inside)
            if all(len(rows) for rows in within):
                best.add(block, ranked[np.ix_(*within)], within)

    def slowest_kept(self, products: Products, product: CaseProduct) -> Array:
        """For the configurations of a product, the seconds above which one changes no result but `fitting`.

        It is neither among the best, of all or of a part, nor the best with any of its values; and something fits with each of
        these, so that the least bytes with a value do not matter.
        """
        limit = np.full(product.shape, self._limit(self._best[0]))
        for axis, count in enumerate(product.shape):
            shape = [1] * len(product.shape)
            shape[axis] = count
            limit = np.maximum(limit, self._limits_of_values(products, product, axis).reshape(shape))
        for best, inside in zip(self._best[1:], _within(products, product, self.apart), strict=True):
            within = np.ix_(*(np.flatnonzero(mask) for mask in inside))
            limit[within] = np.maximum(limit[within], self._limit(best))
        return limit

    def slowest_kept_of_rows(self, products: Products, product: CaseProduct) -> Array:
        """For the rows of the first axis of a product, the largest of `slowest_kept`."""
        axes = range(len(product.axes))
        first, *other_limits = (self._limits_of_values(products, product, axis) for axis in axes)
        limit = np.maximum(
            first, max([self._limit(self._best[0]), *(float(axis_limits.max()) for axis_limits in other_limits)])
        )
        for best, inside in zip(self._best[1:], _within(products, product, self.apart), strict=True):
            limit[inside[0]] = np.maximum(limit[inside[0]], self._limit(best))
        return limit

    def _limit(self, best: "_BestConfigs") -> float:
        return self.slowest if self.slowest is not None else best.last

    def _limits_of_values(self, products: Products, product: CaseProduct, axis: int) -> Array:
        """For each row of an axis, the largest of the seconds of the best with one of its values; infinite if nothing with one
        of them fits so far.
        """
        limit = np.zeros(product.axes[axis].count)
        for depth, name in self._compared_on(products, axis):
            results = map(self._values.get(name, {}).get, products.values[depth])
            limits = [
                np.inf if result is None or not result.fits else result.least if self.slowest is None else self.slowest
                for result in results
            ]
            limit = np.maximum(limit, np.array(limits)[product.axes[axis].columns[depth]])
        return limit

    def _compared_on(self, products: Products, axis: int) -> list[tuple[int, str]]:
        """The compared knobs of an axis, with their positions in SEARCH_ORDER."""
        owners = zip(products.axis_of, SEARCH_ORDER, strict=True)
        return [(depth, name) for depth, (owner, name) in enumerate(owners) if owner == axis and name in self.compared]

    def scanned(self) -> Scanned:
        """Return the results."""
        first, *part_leaders = (best.leaders() for best in self._best)
        varied = {name: self._values[name] for name in SEARCH_ORDER if len(self._values.get(name, ())) > 1}
        return Scanned(
            leaders=first,
            apart=tuple(part_leaders),
            count=self.count,
            fitting=self.fitting,
            fastest=self.fastest,
            least=self.least,
            slowest=math.inf if self.slowest is None else self.slowest,
            at_best={name: {value: _at_best(result) for value, result in values.items()} for name, values in varied.items()},
        )

    def _compare(self, block: PredictionBlock, ranked: Array, axis: int) -> None:
        """Record the best for each value of each knob of an axis, and the least memory."""
        other_axes = tuple(other_axis for other_axis in range(ranked.ndim) if other_axis != axis)
        fits = np.where(block.fits.any(axis=other_axes), 0.0, np.inf)
        least = [fits, block.memory.min(axis=other_axes), ranked.min(axis=other_axes)]
        for depth, name in self._compared_on(block.products, axis):
            column, values = block.product.axes[axis].columns[depth], block.products.values[depth]
            tables = np.full((3, len(values)), np.inf)
            for table, part in zip(tables, least, strict=True):
                np.minimum.at(table, column if len(column) > 1 else np.full(len(part), column[0]), part)
            for code in np.unique(column):
                result = self._values.setdefault(name, {}).setdefault(values[code], _ValueResult())
                fitting, needed, best = tables[:, code].tolist()
                result.needed, result.fits = min(result.needed, needed), result.fits or fitting == 0.0
                if best < result.least:
                    result.least, result.best = best, _first_of(block, ranked, axis, column == code, best)


@dataclass(slots=True)
class _BestConfigs:
    """The best configurations so far."""

    by_memory: bool
    most: int
    _results: Array = field(default_factory=lambda: np.empty((0, 2)))
    """Seconds and bytes of each, best first."""
    _codes: Codes = field(default_factory=lambda: np.empty((0, len(SEARCH_ORDER)), dtype=np.int16))
    _spaces: list[Products] = field(default_factory=list)
    _space_of: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Index in `_spaces` of each."""

    @property
    def last(self) -> float:
        """The result of the last one; infinite: there are fewer than are kept."""
        return float(self._results[-1, int(self.by_memory)]) if len(self._results) == self.most else np.inf

    def add(self, block: PredictionBlock, ranked: Array, rows: tuple[Index, ...]) -> None:
        """Merge those that are as good as the last one; `ranked` has the results of these rows of each axis."""
        places = np.flatnonzero((ranked <= self.last) & (ranked < np.inf))
        if len(places) > self.most:
            flat = ranked.ravel()[places]
            places = places[flat <= np.partition(flat, self.most - 1)[self.most - 1]]
        if not len(places):
            return
        at = tuple(axis_rows[index] for axis_rows, index in zip(rows, np.unravel_index(places, ranked.shape), strict=True))
        if not self._spaces or self._spaces[-1] is not block.products:
            self._spaces.append(block.products)
        codes = np.concatenate([self._codes, block.products.codes_at(block.product, at)])
        space_of = np.concatenate([self._space_of, np.full(len(places), len(self._spaces) - 1)])
        results = np.concatenate([self._results, np.column_stack([block.seconds[at], block.memory[at]])])
        order = _in_order(results, codes, space_of, self.by_memory)[: self.most]
        self._results, self._codes, self._space_of = results[order], codes[order], space_of[order]

    def leaders(self) -> tuple[Leader, ...]:
        """The configurations, best first."""
        return tuple(
            Leader(config=self._spaces[space].config_of(codes), seconds=seconds, memory=memory)
            for space, codes, (seconds, memory) in zip(self._space_of, self._codes, self._results.tolist(), strict=True)
        )


def _in_order(results: Array, codes: Codes, space_of: Index, by_memory: bool) -> Index:
    """Indices, best first; equal ones in the order of the space."""
    varying = np.flatnonzero((codes != codes[0]).any(axis=0))
    seconds, memory = results.T
    best = (seconds, memory) if by_memory else (memory, seconds)
    return np.lexsort((*(codes[:, depth] for depth in varying[::-1]), space_of, *best))


def _first_of(
    block: PredictionBlock, ranked: Array, axis: int, chosen: Mask, least: float
) -> tuple[Products, Codes, float, float]:
    """Of the configurations with the chosen rows of an axis and this result, the first in the order of the space."""
    shape = [1] * ranked.ndim
    shape[axis] = len(chosen)
    at = np.nonzero((ranked == least) & chosen.reshape(shape))
    codes = block.products.codes_at(block.product, at)
    first = np.lexsort(codes.T[::-1])[0]
    position = tuple(index[first] for index in at)
    return block.products, codes[first], float(block.seconds[position]), float(block.memory[position])


def _within(products: Products, product: CaseProduct, parts: Sequence[SpacePart]) -> list[list[Mask]]:
    """For each part, the rows of each axis whose values are in it."""
    tables: dict[tuple[int, frozenset[Value]], Mask] = {}
    masks = []
    for part in parts:
        inside = [np.ones(axis.count, dtype=bool) for axis in product.axes]
        for name, allowed in part.values.items():
            depth = SEARCH_ORDER.index(name)
            axis = products.axis_of[depth]
            if (depth, allowed) not in tables:
                values = np.array([value in allowed for value in products.values[depth]])
                tables[depth, allowed] = values[product.axes[axis].columns[depth]]
            inside[axis] = inside[axis] & tables[depth, allowed]
        masks.append(inside)
    return masks


def _at_best(result: _ValueResult) -> AtBest:
    leader = None
    if result.best is not None:
        products, codes, seconds, memory = result.best
        leader = Leader(config=products.config_of(codes), seconds=seconds, memory=memory)
    return AtBest(leader=leader, needed=result.needed, fits=result.fits)
