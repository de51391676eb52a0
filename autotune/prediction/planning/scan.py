"""A space in one pass: the best configurations, and the best result for each value of each knob."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.cases.grid import Codes, Grid, Rows
from autotune.prediction.cases.grid_cases import UNIFORM, GridCases
from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.room import Room
from search_spaces.canonical import SEARCH_ORDER, canonical_value
from search_spaces.errors import SpaceTooLargeError
from search_spaces.knob import Planning, Value
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

BUCKETS = tuple(
    knob.name for knob in sorted(KNOBS.values(), key=lambda knob: knob.tuned) if knob.planning is Planning.TUNED_LAST
)
"""Knobs that are only set for the best: how communication and the loss are cut, which hardly changes the order."""
UNMODELLED = tuple(knob.name for knob in KNOBS.values() if knob.planning is Planning.NOT_MODELLED)
"""Knobs that no equation reads, but for `compile_blocks` in 8 bits: they stand near the device's defaults."""
NOT_SCANNED = frozenset({*BUCKETS, *UNMODELLED})
KEPT = 1000
"""Number of configurations whose buckets are set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a scan."""

    configurations: int | None = None
    """None: no limit."""
    until: float | None = None
    """Time of `time.monotonic` at which the scan is aborted; None: never."""


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
    """Least bytes with the value, whether it fits or not."""
    fits: bool
    """Whether any configuration with the value fits, however slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """The result of a scan."""

    leaders: tuple[Leader, ...]
    """Best first, at most `KEPT`."""
    count: int
    """Number of predicted configurations."""
    fitting: int
    fastest: float
    """Seconds of the fastest step that fits; infinite: none fits."""
    least: float
    """Least bytes of any configuration, whether it fits or not."""
    at_best: dict[str, dict[Value, AtBest]]
    """Knob -> value -> its best result, for the knobs with several values."""


def scan(question: Question, space: SearchSpace, room: Room, *, slowest: float | None, bounds: Bounds) -> Scanned:
    """Predict every configuration of the space, buckets at their defaults.

    Args:
        question: the question.
        space: the space to scan.
        room: the memory limits.
        slowest: None: rank by time. Seconds: rank by memory among all steps that take no longer.
        bounds: limits of the scan.

    Raises:
        SpaceTooLargeError: the bounds are exceeded.
    """
    found = _Found(by_memory=slowest is not None)
    for part in uniform_parts(without_buckets(space)):
        grid = Grid(part)
        cases = GridCases(part, question.model, question.engine, grid)
        for rows in grid.blocks():
            require_within(bounds, found.count + rows.count * grid.sides.count)
            held, fits, block = _predicted(question, room, slowest, grid, cases, rows)
            found.count_all(grid, rows, held, fits)
            if block is not None:
                found.add(block)
    return found.scanned()


def _predicted(
    question: Question, room: Room, slowest: float | None, grid: Grid, cases: GridCases, rows: Rows
) -> "tuple[Array, NDArray[np.bool_], _Block | None]":
    """Memory of all configurations of the rows, whether they fit, and the time of the rows of which some do."""
    needed, shape = memory(cases.of(rows), question.rates), (rows.count, grid.sides.count)
    held = np.broadcast_to(needed.needed, shape)
    fits = np.broadcast_to(room.holds(held, needed.host), shape)
    some = np.flatnonzero(fits.any(axis=1))
    if not len(some):
        return held, fits, None
    fitting = rows.take(some)
    seconds = np.broadcast_to(seconds_of(cases.of(fitting), question.rates), (len(some), grid.sides.count))
    leads = fits[some] if slowest is None else fits[some] & (seconds <= slowest)
    return held, fits, _Block(grid, fitting, seconds, held[some], leads)


def without_buckets(space: SearchSpace) -> SearchSpace:
    """The space with each bucket, and each knob that no equation reads, at the value nearest to the base's.

    With less than a block prefetched, stage 3 waits in every layer, which does change the order: there a block is prefetched.
    """
    excluded = {name: values for name, values in space.domains.items() if name in NOT_SCANNED}
    standing = {name: _nearest(getattr(space.base, name), values) for name, values in excluded.items()}
    sizes, layer = [int(size) for size in excluded.get("prefetch_bucket_size", ())], _layer_parameters(space.context.model)
    if sizes and space.base.prefetch_bucket_size < layer:
        standing["prefetch_bucket_size"] = min((size for size in sizes if size >= layer), default=max(sizes))
    if False in excluded.get("compile_blocks", ()):  # false excludes no other value
        standing["compile_blocks"] = False
    domains = {name: values for name, values in space.domains.items() if name not in excluded}
    return dataclasses.replace(space, domains=domains, base=space.base.replace(standing))


def _layer_parameters(model: Model) -> int:
    """Parameters of a layer, or of the largest block of a module; 0: unknown."""
    if isinstance(model, ModelSpec):
        return model.layer_parameters
    if not isinstance(model, FactoryModel) or model.profile is None:
        return 0
    blocks: dict[int, int] = {}
    for parameter in model.profile.trained:
        blocks[parameter.block] = blocks.get(parameter.block, 0) + parameter.elements
    return max((size for block, size in blocks.items() if block >= 0), default=0)


def _nearest(value: Value, values: Sequence[Value]) -> Value:
    if value in values or isinstance(value, bool | str):
        return value if value in values else values[0]
    return min(values, key=lambda other: abs(float(other) - float(value)))


def uniform_parts(space: SearchSpace) -> Iterator[SearchSpace]:
    """Split the space into parts with one precision, one attention kernel and one kind of adapters each.

    Equivalent values, such as a kernel that torch would choose anyway, count as one: each configuration is in one part.
    """
    varied = [name for name in UNIFORM if name in space.domains]
    domains = {name: values for name, values in space.domains.items() if name not in UNIFORM}
    values = itertools.product(*(space.domains[name] for name in varied))
    bases = (_uniform(space, dict(zip(varied, point, strict=True))) for point in values)
    for base in dict.fromkeys(bases):
        yield dataclasses.replace(space, domains=domains | {name: (getattr(base, name),) for name in varied})


def _uniform(space: SearchSpace, values: Mapping[str, Value]) -> TrialConfig:
    """The base with these values of uniform knobs, which are ordered so that each reads only those before it."""
    base = space.base.replace(values)
    for name in UNIFORM:
        base = base.replace({name: canonical_value(name, getattr(base, name), base, space.context)})
    return base


@dataclass(frozen=True, slots=True)
class _Block:
    """Predictions for rows x sides; arrays of shape (rows, sides)."""

    grid: Grid
    rows: Rows
    seconds: Array
    memory: Array
    leads: NDArray[np.bool_]
    """Configurations that fit and are fast enough."""


@dataclass(slots=True)
class _Value:
    """Results so far for one value of one knob."""

    least: float = np.inf
    """Seconds or bytes of the best."""
    needed: float = np.inf
    fits: bool = False
    best: tuple[Grid, Codes, float, float] | None = None
    """Grid, codes, seconds and bytes of the best."""


@dataclass(slots=True, kw_only=True)
class _Found:
    """Results so far."""

    by_memory: bool
    """Whether configurations are ranked by memory."""
    count: int = 0
    fitting: int = 0
    fastest: float = np.inf
    least: float = np.inf
    _values: dict[str, dict[Value, _Value]] = field(default_factory=dict)
    _ranked: Array = field(default_factory=lambda: np.empty((0, 2)))
    """Seconds and bytes of each leader, best first."""
    _configs: list[tuple[Grid, Codes]] = field(default_factory=list)
    """The grid and the codes of each leader."""

    def count_all(self, grid: Grid, rows: Rows, held: Array, fits: NDArray[np.bool_]) -> None:
        """Count predictions, and record the least memory for each value of each knob."""
        self.count += held.size
        self.fitting += int(np.count_nonzero(fits))
        self.least = min(self.least, float(held.min()))
        for _, name, _, value, (least, fitting) in _by_value(grid, rows, (held, np.where(fits, 0.0, np.inf))):
            found = self._values.setdefault(name, {}).setdefault(value, _Value())
            found.needed, found.fits = min(found.needed, least), found.fits or fitting == 0.0

    def add(self, block: _Block) -> None:
        """Add predictions of which some fit."""
        ranked = np.where(block.leads, block.memory if self.by_memory else block.seconds, np.inf)
        self.fastest = min(self.fastest, float(np.where(block.leads, block.seconds, np.inf).min()))
        self._compare(block, ranked)
        self._lead(block, ranked.ravel())

    def scanned(self) -> Scanned:
        """Return the results."""
        leaders = [
            Leader(config=grid.config_of(codes), seconds=float(seconds), memory=float(memory))
            for (grid, codes), (seconds, memory) in zip(self._configs, self._ranked, strict=True)
        ]
        varied = {name: values for name, values in self._values.items() if len(values) > 1 and name not in NOT_SCANNED}
        return Scanned(
            leaders=tuple(leaders),
            count=self.count,
            fitting=self.fitting,
            fastest=self.fastest,
            least=self.least,
            at_best={name: {value: _at_best(found) for value, found in values.items()} for name, values in varied.items()},
        )

    def _lead(self, block: _Block, ranked: Array) -> None:
        """Merge those of the block that are better than the last leader into the leaders."""
        last = self._ranked[-1, 1 if self.by_memory else 0] if len(self._ranked) == KEPT else np.inf
        places = np.flatnonzero(ranked < last)
        if not len(places):
            return
        if len(places) > KEPT:
            places = places[np.argpartition(ranked[places], KEPT - 1)[:KEPT]]
        both = np.concatenate([self._ranked, np.column_stack([block.seconds.ravel()[places], block.memory.ravel()[places]])])
        order = np.lexsort((both[:, 0], both[:, 1]) if self.by_memory else (both[:, 1], both[:, 0]))[:KEPT]
        codes = block.grid.codes_at(block.rows, places)
        old = len(self._configs)
        self._configs = [self._configs[at] if at < old else (block.grid, codes[at - old]) for at in order]
        self._ranked = both[order]

    def _compare(self, block: _Block, ranked: Array) -> None:
        """Record the best for each value of each knob."""
        for column, name, code, value, (least,) in _by_value(block.grid, block.rows, (ranked,)):
            found = self._values[name][value]
            if least >= found.least:
                continue
            if name in block.grid.on_side:
                at = int(np.flatnonzero((column == code) & (ranked.min(axis=0) == least))[0])
                row, side = int(ranked[:, at].argmin()), at
            else:
                row = int(np.flatnonzero((column == code) & (ranked.min(axis=1) == least))[0])
                side = int(ranked[row].argmin())
            codes = block.grid.codes_at(block.rows, np.array([row * block.grid.sides.count + side]))[0]
            found.least = least
            found.best = (block.grid, codes, float(block.seconds[row, side]), float(block.memory[row, side]))


def _by_value(grid: Grid, rows: Rows, arrays: Sequence[Array]) -> Iterator[tuple[Codes, str, int, Value, tuple[float, ...]]]:
    """The minimum of each array over the configurations with a value: for each knob and value, with the knob's codes."""
    by_row, by_side = [array.min(axis=1) for array in arrays], [array.min(axis=0) for array in arrays]
    for depth, name in enumerate(SEARCH_ORDER):
        if name in NOT_SCANNED:
            continue
        side = name in grid.on_side
        column, least = (grid.sides if side else rows).columns[depth], by_side if side else by_row
        tables = np.full((len(arrays), len(grid.values[depth])), np.inf)
        for table, part in zip(tables, least, strict=True):
            np.minimum.at(table, column if len(column) > 1 else np.full(len(part), column[0]), part)
        for code in np.unique(column):
            yield column, name, int(code), grid.values[depth][code], tuple(float(table[code]) for table in tables)


def _at_best(found: _Value) -> AtBest:
    leader = None
    if found.best is not None:
        grid, codes, seconds, memory = found.best
        leader = Leader(config=grid.config_of(codes), seconds=seconds, memory=memory)
    return AtBest(leader=leader, needed=found.needed, fits=found.fits)


def require_within(bounds: Bounds, count: int) -> None:
    """Raise if the bounds are exceeded.

    Raises:
        SpaceTooLargeError: they are.
    """
    if bounds.configurations is not None and count > bounds.configurations:
        raise SpaceTooLargeError(
            "space", f"it has more than {bounds.configurations:,} configurations", "pin some knobs, or choose a smaller space"
        )
    if bounds.until is not None and time.monotonic() > bounds.until:
        raise SpaceTooLargeError("space", "it takes too long to rank", "pin some knobs, or choose a smaller space")
