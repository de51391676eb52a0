"""The legal configurations of a space as products of axes, so that equations compute once whatever depends on few of them.

1. The first axis has the degrees of parallelism and the micro-batch, to which rules tie most of the other knobs.
2. Given a row of it, groups of the other knobs are independent of each other: each group is another axis, and a mask per group
   says which of its combinations are legal with which row. The groups follow from the rules, as in `grid`.
3. A block of the space is a part of each axis. Its arrays have one dimension for each axis; those of a knob have one element in
   all dimensions but its own.

The configurations equal those of `SearchSpace.enumerate`; none of them is listed.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.cases.grid import BLOCK, DEPTHS, Codes, Index, KnobRows, RowBuilder, groups_of, varies
from search_spaces.canonical import SEARCH_ORDER
from search_spaces.checkpoints import checkpoint
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

FIRST = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "micro_batch_size", "sequence_parallel",
    "expert_parallel_size", "expert_tensor_parallel_size", "pipeline_schedule", "virtual_stages",
)  # fmt: skip
"""Knobs of the first axis, if they vary; those that their rules read are added. How states are sharded, which most of the time
of a step does not depend on, is on another axis."""
NOTHING = np.zeros(1, dtype=np.int16)
"""The column of a knob that is on another axis."""

LARGEST = 1 << 62

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
        if size * values >= LARGEST:
            met, row_codes = np.unique(row_codes, return_inverse=True)
            size = len(met)
        row_codes, size = row_codes * values + column, size * values
    _, firsts, kinds = np.unique(row_codes, return_index=True, return_inverse=True)
    return firsts, kinds
