"""The configurations of a space as cases: parts of its grid, and its legal ones as products of axes.

Equations compute once whatever depends on few axes.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.cases.config_cases import (
    described,
    engine_software,
    layouts_from,
    library_arguments,
    memory_arguments,
    shapes_of,
)
from autotune.prediction.cases.grid import BLOCK, DEPTHS, Codes, Index, KnobRows, RowBuilder, groups_of, varies
from autotune.prediction.equations.cases import Array, Cases, Layouts, RankTable
from autotune.prediction.equations.hardware import devices_of, hardware_of
from autotune.prediction.equations.layer_shapes import documented, layer_kinds, loaded, trained_shapes
from autotune.prediction.equations.schedules import scheduled
from autotune.prediction.equations.software import Megatron, Software, Transformers
from autotune.prediction.equations.uneven import LayoutKey, layout_key, tabled
from search_spaces.canonical import SEARCH_ORDER
from search_spaces.knob import Planning, Value
from search_spaces.knob_values import KNOBS
from search_spaces.lattice import checkpoint
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

UNIFORM = tuple(knob.name for knob in KNOBS.values() if knob.planning is Planning.FIXED)
"""Knobs that all configurations of a grid have the same value of: what computes and is trained, and how, follows from them."""


_PLACING = ("pipeline_parallel_size", "virtual_stages", "pipeline_schedule", "pipeline_layout")
"""Knobs on which it depends which rank of a pipeline holds what."""

Part = TypeVar("Part", contravariant=True)


class Coded(Protocol[Part]):
    """Configurations in parts: of a `Grid` its rows, of `Products` each product."""

    @property
    def values(self) -> Sequence[list[Value]]:
        """For each knob of SEARCH_ORDER, the values that occur."""
        ...

    def codes(self, rows: Part, name: str, /) -> Codes:
        """The indices of one knob's values in a part, with one dimension for each axis."""
        ...


def placing_knobs(space: SearchSpace) -> tuple[str, ...]:
    """The knobs on which it depends what each rank of a pipeline holds, and where, in a space with explicit layers."""
    written = space.domains.get("pipeline_layout", (space.base.pipeline_layout,)) != ("",)
    if space.cluster.groups:  # nodes differ, so that the devices of a stage matter too
        return (*_PLACING, "pipeline_split", "tensor_parallel_size", "context_parallel_size", "rank_order")
    return _PLACING if written else ()


class GridCases(Generic[Part]):
    """Makes the cases of a grid's parts."""

    def __init__(
        self, space: SearchSpace, model: ModelSpec | FactoryModel, engine: str, grid: Coded[Part],
        arguments: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._world, self._batch, self._grid = space.world_size, space.workload.global_batch_size, grid
        same = {name: _only(space, name) for name in UNIFORM}
        precision, attention = same["precision"], same["attention_backend"]
        self._alike = space.base.replace(same)
        length, alike = space.workload.sequence_length, [self._alike]
        self._shapes = shapes_of(model, length)
        if isinstance(model, ModelSpec):
            shapes = trained_shapes(self._shapes, model, length, alike)
            self._shapes = documented(shapes, model, space.workload, alike)
        self._module = described(model, str(precision), space.cluster.device.kind)
        self._hardware = hardware_of(space.cluster, str(precision))
        self._software: Software = engine_software(model, engine, {str(attention)}, space.cluster.device.kind)
        self._megatron, self._transformers = Megatron(), Transformers()
        if isinstance(model, ModelSpec):
            self._megatron = memory_arguments(model, space.cluster, str(attention), arguments)
            self._transformers = library_arguments(model, space.cluster, self._alike, arguments)
        self._space, self._model = space, model
        self._keys: dict[tuple[Value, ...], LayoutKey | None] = {}
        """By values of the placing knobs."""
        self._devices = devices_of(space.cluster, str(precision))
        windows = self._alike.attention_window == 0
        self._kinds = layer_kinds(model, length, windows) if isinstance(model, ModelSpec) else ()
        self._placing = placing_knobs(space) or ((*_PLACING, "pipeline_split") if self._kinds else ())

    def of(self, part: Part) -> Cases:
        """The cases of a part."""
        return self._cases(lambda name: self._grid.codes(part, name))

    def at(self, codes: Codes) -> Cases:
        """The cases of configurations that have these codes, of shape (configurations, knobs)."""
        return self._cases(lambda name: codes[:, SEARCH_ORDER.index(name)])

    def _cases(self, codes_of: Callable[[str], Codes]) -> Cases:
        layouts, ranks = scheduled(self._layouts(codes_of), [self._alike], self._space.workload), None
        if isinstance(self._model, ModelSpec):
            layouts = loaded(layouts, self._model)
        if self._placing and isinstance(self._model, ModelSpec):
            laid_out, ranks = self._laid_out(codes_of)
            layouts = dataclasses.replace(layouts, laid_out=laid_out)
        return Cases(
            shapes=self._shapes, hardware=self._hardware, layouts=layouts, software=self._software, megatron=self._megatron,
            transformers=self._transformers,
            ranks=ranks,
            devices=self._devices, module=self._module, kinds=self._kinds,
        )  # fmt: skip

    def _layouts(self, codes_of: Callable[[str], Codes]) -> Layouts:
        def number(name: str, meaning: Callable[[Value], float] = float, /) -> Array:
            return numbers(self._grid, name, codes_of(name), meaning)

        return layouts_from(number, self._batch, self._world)

    def _laid_out(self, codes_of: Callable[[str], Codes]) -> tuple[Array, RankTable | None]:
        """Which rank holds what, and where: asked once for each combination of the knobs that it depends on."""
        combined = np.zeros(1, dtype=np.int64)
        for name in self._placing:
            combined = combined * len(self._values(name)) + codes_of(name)
        assert isinstance(self._model, ModelSpec)
        met, inverse = np.unique(combined, return_inverse=True)
        length = self._space.workload.sequence_length
        windows, cluster = self._alike.attention_window == 0, self._space.cluster
        combinations = [self._combination(number) for number in met.tolist()]
        for values in combinations:
            if values not in self._keys:
                config = self._space.base.replace(dict(zip(self._placing, values, strict=True)))
                self._keys[values] = layout_key(config, self._model, cluster, length, windows)
        codes, table = tabled([self._keys[values] for values in combinations])
        return codes[inverse].reshape(combined.shape), table

    def _combination(self, combined: int) -> tuple[Value, ...]:
        """The values of the placing knobs."""
        values: list[Value] = []
        for name in reversed(self._placing):
            combined, code = divmod(combined, len(self._values(name)))
            values.append(self._values(name)[code])
        return tuple(reversed(values))

    def _values(self, name: str) -> list[Value]:
        return self._grid.values[SEARCH_ORDER.index(name)]


def numbers(grid: Coded[Any], name: str, codes: Codes, meaning: Callable[[Value], float] = float) -> Array:
    """What the codes of a knob mean."""
    table = np.array([meaning(value) for value in grid.values[SEARCH_ORDER.index(name)]], dtype=np.float64)
    return table[codes]


def _only(space: SearchSpace, name: str) -> Value:
    """The one value of a knob that is the same everywhere."""
    values: tuple[Value, ...] = space.domains.get(name, (getattr(space.base, name),))
    if len(values) != 1:
        raise ValueError(f"{name} has {len(values)} values in one grid")
    return values[0]


FIRST = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "micro_batch_size", "sequence_parallel",
    "expert_parallel_size", "expert_tensor_parallel_size", "pipeline_schedule", "virtual_stages",
)  # fmt: skip
"""Knobs of the first axis, if they vary; those that their rules read are added. How states are sharded, which most of the time
of a step does not depend on, is on another axis."""
NOTHING = np.zeros(1, dtype=np.int16)
"""The column of a knob that is on another axis."""


Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CaseProduct:
    """The legal ones among the combinations of the axes' rows."""

    axes: tuple[KnobRows, ...]
    masks: tuple[Mask, ...]
    """For each axis but the first: which of its rows are legal with which row of the first, of shape (first, axis)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows of each axis."""
        return tuple(axis.count for axis in self.axes)

    @property
    def count(self) -> int:
        """Number of legal configurations."""
        return int(reduce(np.multiply, (mask.sum(axis=1) for mask in self.masks), np.ones(self.axes[0].count)).sum())

    def take(self, rows: Sequence[Index]) -> "CaseProduct":
        """The combinations of these rows of each axis."""
        axes = tuple(axis.take(chosen) for axis, chosen in zip(self.axes, rows, strict=True))
        first, *other_rows = rows
        return CaseProduct(axes, tuple(mask[np.ix_(first, other)] for mask, other in zip(self.masks, other_rows, strict=True)))

    def take_rows(self, rows: Index) -> "CaseProduct":
        """The combinations of these rows of the first axis."""
        first, *other_axes = self.axes
        return CaseProduct((first.take(rows), *other_axes), tuple(mask[rows] for mask in self.masks))

    @property
    def legal(self) -> Mask:
        """Which combinations are legal."""
        combinations: Mask = np.ones((1,) * len(self.axes), dtype=bool)
        for axis, mask in enumerate(self.masks, start=1):
            shape = [1] * len(self.axes)
            shape[0], shape[axis] = mask.shape
            combinations = combinations & mask.reshape(shape)
        return np.broadcast_to(combinations, self.shape)

    def parts(self, most: int) -> "Iterator[tuple[list[Index], CaseProduct]]":
        """The configurations in parts of at most so many combinations: halved along the first axis, then the longest. With each
        part the rows of every axis that it has.
        """
        first = np.logical_and.reduce([np.ones(self.axes[0].count, dtype=bool), *(mask.any(axis=1) for mask in self.masks)])
        rows = [np.flatnonzero(first), *(np.flatnonzero(mask[first].any(axis=0)) for mask in self.masks)]
        size = int(np.prod([float(len(axis_rows)) for axis_rows in rows]))
        if 0 < size <= most:
            yield rows, self if tuple(map(len, rows)) == self.shape else self.take(rows)
        elif size:
            axis = 0 if len(rows[0]) > 1 else max(range(len(rows)), key=lambda axis_index: len(rows[axis_index]))
            middle = (len(rows[axis]) + 1) // 2
            for half in (rows[axis][:middle], rows[axis][middle:]):
                chosen = [*rows[:axis], half, *rows[axis + 1 :]]
                for inner, part in self.take(chosen).parts(most):
                    yield [axis_rows[at] for axis_rows, at in zip(chosen, inner, strict=True)], part


class Products:
    """The legal configurations of a space.

    Raises:
        SpaceTooLargeError: evaluating the rules takes more than the space's `most_steps`.
    """

    def __init__(self, space: SearchSpace, together: Collection[str] = ()) -> None:
        """`together`: further knobs of the first axis."""
        self._builder = RowBuilder(space)
        self.values = self._builder.values
        """For each knob of SEARCH_ORDER, its domain, and other values that occur."""
        varying = {depth for depth in DEPTHS if varies(space, depth)}
        first = _first(space, varying, {SEARCH_ORDER.index(name) for name in (*FIRST, *together)})
        groups = groups_of(space.lattice, varying - first)
        self.axis_of = tuple(_owner(space, depth, groups) for depth in DEPTHS)
        """For each knob of SEARCH_ORDER, its axis; those with a single value are on any."""
        self._reads = tuple(space.lattice.reads(depth) for depth in DEPTHS)
        self._first = self._walk_first()
        axes = [self._axis(number) for number in range(1, len(groups) + 1)] if self._first.count else []
        self.whole = CaseProduct((self._first, *(axis for axis, _ in axes)), tuple(mask for _, mask in axes))
        """All configurations."""

    @property
    def count(self) -> int:
        """Number of legal configurations."""
        return self.whole.count

    def blocks(self, configurations: int = BLOCK) -> Iterator[CaseProduct]:
        """All configurations, in parts with at most so many combinations."""
        yield from (part for _, part in self.whole.parts(configurations))

    def codes(self, product: CaseProduct, name: str) -> Codes:
        """The indices of one knob's values, with one dimension for each axis."""
        depth = SEARCH_ORDER.index(name)
        axis, shape = self.axis_of[depth], [1] * len(product.axes)
        column = product.axes[axis].columns[depth]
        shape[axis] = len(column)
        return column.reshape(shape)

    def codes_at(self, product: CaseProduct, at: Sequence[Index]) -> Codes:
        """The codes of the configurations at these indices of each axis: of shape (configurations, knobs)."""
        codes = np.empty((len(at[0]), len(SEARCH_ORDER)), dtype=np.int16)
        for depth in DEPTHS:
            axis = self.axis_of[depth]
            column = product.axes[axis].columns[depth]
            codes[:, depth] = column[at[axis]] if len(column) > 1 else column[0]
        return codes

    def config_of(self, codes: Codes) -> TrialConfig:
        """The configuration with these codes."""
        return self._builder.config_of(codes)

    def _walk_first(self) -> KnobRows:
        rows = KnobRows((), 1)
        for depth in DEPTHS:
            checkpoint()
            rows, _ = self._builder.extended(rows, self._builder.step(depth, self.axis_of[depth] == 0))
            if not rows.count:
                return KnobRows(tuple(NOTHING for _ in DEPTHS), 0)
        return rows

    def _axis(self, number: int) -> tuple[KnobRows, Mask]:
        """The combinations of a group's knobs, and which of them are legal with which row of the first axis."""
        depths = [depth for depth in DEPTHS if self.axis_of[depth] == number]
        read = {read_depth for depth in depths for read_depth in self._reads[depth] if self.axis_of[read_depth] == 0}
        kinds, kind_of = _distinct([self._first.columns[depth] for depth in sorted(read)], self._first.count)
        rows, origin = KnobRows((), len(kinds)), np.arange(len(kinds))
        for depth in DEPTHS:
            checkpoint()
            if depth in depths:
                rows, source = self._builder.extended(rows, self._builder.step(depth, True))
                origin = origin if source is None else origin[source]
                if not rows.count:
                    return KnobRows(tuple(NOTHING for _ in DEPTHS), 0), np.zeros((self._first.count, 0), dtype=bool)
                continue
            column = self._first.columns[depth] if depth in read else NOTHING
            rows = KnobRows((*rows.columns, column[kinds][origin] if len(column) > 1 else column), rows.count)
        chosen, combination_index = _distinct([rows.columns[depth] for depth in depths], rows.count)
        legal = np.zeros((len(kinds), len(chosen)), dtype=bool)
        legal[origin, combination_index] = True
        columns = tuple(rows.take(chosen).columns[depth] if depth in depths else NOTHING for depth in DEPTHS)
        return KnobRows(columns, len(chosen)), legal[kind_of]


def _first(space: SearchSpace, varying: set[int], requested: set[int]) -> set[int]:
    """The depths of the first axis: those wanted that vary, and all on which their legal values depend."""
    first, waiting = set[int](), requested & varying
    while waiting:
        first |= waiting
        waiting = {read for depth in first for read in space.lattice.reads(depth) if read in varying} - first
    return first


def _owner(space: SearchSpace, depth: int, groups: Sequence[frozenset[int]]) -> int:
    """The axis on which a knob is extended: of a group if its rules read one of the group's knobs, else the first."""
    tied = {depth, *space.lattice.reads(depth)}
    return next((number for number, group in enumerate(groups, start=1) if group & tied), 0)


def _distinct(columns: Sequence[Codes], count: int) -> tuple[Index, Index]:
    """Of so many rows with these columns, the first of each kind in lexicographic order, and the kind of each row."""
    if not columns:
        return np.zeros(1, dtype=np.int64), np.zeros(count, dtype=np.int64)
    row_codes, size = np.zeros(count, dtype=np.int64), 1
    for column in columns:
        values = int(column.max(initial=0)) + 1
        if size * values >= (1 << 62):
            met, row_codes = np.unique(row_codes, return_inverse=True)
            size = len(met)
        row_codes, size = row_codes * values + column, size * values
    _, firsts, kinds = np.unique(row_codes, return_index=True, return_inverse=True)
    return firsts, kinds
