"""Every legal configuration of a space as arrays: millions, without a Python step for each.

The configurations are built knob by knob, as in `search_spaces.lattice`, but all at once: a knob's legal values depend on few
other knobs, so its rules and conditions are evaluated once per combination of those, and the result applies to every row with
that combination. The rules are thus written only once, and the configurations equal those of `SearchSpace.enumerate`.

Knobs without a rule or condition that ties them to the others are not multiplied out: they form a second axis. Equations over
arrays of shape (rows, 1) and (1, sides) then compute once whatever depends on one axis only.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search_spaces.canonical import SEARCH_ORDER
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.lattice import Lattice, checkpoint
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

Codes = NDArray[np.int16]
Index = NDArray[np.int64]

BLOCK = 65_536
"""Configurations per block: few enough that its arrays stay in a processor's cache."""
DEPTHS = range(len(SEARCH_ORDER))


@dataclass(frozen=True, slots=True)
class KnobRows:
    """Values of knobs, row by row, as their indices in `Grid.values`."""

    columns: tuple[Codes, ...]
    """One for each knob of SEARCH_ORDER: one element per row, or a single one if all rows have the same."""
    count: int

    def take(self, index: Index) -> "KnobRows":
        """The rows at these indices."""
        return KnobRows(tuple(column if len(column) == 1 else column[index] for column in self.columns), len(index))

    def code(self, depth: int, row: int) -> int:
        """The index of a knob's value in a row."""
        column = self.columns[depth]
        return int(column[row if len(column) > 1 else 0])


class RowBuilder:
    """Extends rows knob by knob by the values that the rules allow. Codes are in the order of the domain, so that they order
    configurations as the space does; other values follow as they occur.

    Raises:
        SpaceTooLargeError: evaluating the rules takes more than the space's `most_steps`.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._base, self._lattice = space.base, space.lattice
        self.values: tuple[list[Value], ...] = tuple(list(space.domains.get(name, ())) for name in SEARCH_ORDER)
        """For each knob of SEARCH_ORDER, its domain, and other values that occur."""
        self._places = tuple({value: code for code, value in enumerate(values)} for values in self.values)
        # Canonical form may add three values to a domain: the default, the parameter count, 0.
        self._most = [len(space.domains.get(name, (0,))) + 3 for name in SEARCH_ORDER]

    def step(self, depth: int, judged: bool) -> "KnobStep":
        """The extension by the knob at this depth: by its legal values, or, if it is not judged, by any one value."""
        return KnobStep(self._lattice.reads(depth) if judged else (), judged, self._most)

    def extended(self, rows: KnobRows, step: "KnobStep") -> "tuple[KnobRows, Index | None]":
        """Every row once for each possible value of the next knob, and the rows that they extend; None: each once, in order."""
        combinations = step.combinations(rows)
        for row in step.unknown(combinations):
            step.learn(int(combinations[row if len(combinations) > 1 else 0]), self._next(rows, row, step))
        indices = step.places(combinations)
        if len(indices) == 1 and len(codes := step.following(int(indices[0]))) == 1:
            return KnobRows((*rows.columns, np.array(codes, dtype=np.int16)), rows.count), None
        counts = np.broadcast_to(step.counts(indices), rows.count)
        source = np.repeat(np.arange(rows.count), counts)
        within = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.broadcast_to(step.starts(indices), rows.count)
        return KnobRows((*rows.take(source).columns, step.codes(starts[source] + within)), len(source)), source

    def config_of(self, codes: Codes) -> TrialConfig:
        """The configuration with these codes."""
        return self._base.replace(
            {name: values[code] for name, values, code in zip(SEARCH_ORDER, self.values, codes, strict=True)}
        )

    def _next(self, rows: KnobRows, row: int, step: "KnobStep") -> list[int]:
        """The possible next values for a row."""
        depth = len(rows.columns)
        prefix = [values[0] for values in self.values[:depth]]  # any value, for knobs that are not read
        for read_depth in step.reads if step.judged else self._lattice.reads(depth):
            prefix[read_depth] = self.values[read_depth][rows.code(read_depth, row)]
        values = self._lattice.legal_choices(tuple(prefix)) if step.judged else self._lattice.choices(tuple(prefix))[:1]
        return [self._place(depth, value) for value in values]

    def _place(self, depth: int, value: Value) -> int:
        places, values = self._places[depth], self.values[depth]
        if value not in places:
            places[value] = len(values)
            values.append(value)
        return places[value]


class ConfigGrid:
    """The legal configurations of a space: the product of `rows` and `sides`. Caches the results of the rules.

    Raises:
        SpaceTooLargeError: evaluating the rules takes more than the space's `most_steps`.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space, self._builder = space, RowBuilder(space)
        self.values = self._builder.values
        """For each knob of SEARCH_ORDER, its domain, and other values that occur."""
        groups = groups_of(space.lattice, [depth for depth in DEPTHS if varies(space, depth)])
        largest = max(groups, key=lambda group: _size(space, group), default=frozenset())
        self.on_side = frozenset(SEARCH_ORDER[depth] for group in groups for depth in group if group is not largest)
        """The knobs of the second axis: no rule or condition ties them to the largest group of interdependent knobs."""
        side = {SEARCH_ORDER.index(name) for name in self.on_side}
        # The depths whose rules and conditions read knobs of the second axis.
        judged = {depth for depth in DEPTHS if side & {depth, *space.lattice.reads(depth)}}
        self.sides = joined(list(self._blocks([depth in judged for depth in DEPTHS], 1 << 30)))
        """The second axis: a single row if there are no such knobs."""
        self._judged = [depth not in judged for depth in DEPTHS]

    def blocks(self, configurations: int = BLOCK) -> Iterator[KnobRows]:
        """The first axis, in parts of about `configurations` configurations."""
        if self.sides.count:
            yield from self._blocks(self._judged, max(configurations // self.sides.count, 1))

    def codes(self, rows: KnobRows, name: str) -> Codes:
        """The indices of one knob's values, of shape (rows, 1), (1, sides) or (1, 1)."""
        depth = SEARCH_ORDER.index(name)
        if name in self.on_side:
            return self.sides.columns[depth][np.newaxis, :]
        return rows.columns[depth][:, np.newaxis]

    def configs(self, rows: KnobRows) -> Iterator[TrialConfig]:
        """All configurations of the rows: each row with each side."""
        for codes in self.codes_at(rows, np.arange(rows.count * self.sides.count)):
            yield self.config_of(codes)

    def config(self, rows: KnobRows, index: int) -> TrialConfig:
        """The configuration at an index: row x sides + side."""
        return self.config_of(self.codes_at(rows, np.array([index]))[0])

    def codes_at(self, rows: KnobRows, places: Index) -> Codes:
        """The codes of the configurations at these indices: of shape (places, knobs)."""
        row, side = np.divmod(places, self.sides.count)
        codes = np.empty((len(places), len(SEARCH_ORDER)), dtype=np.int16)
        for depth, name in enumerate(SEARCH_ORDER):
            column, at = (self.sides.columns[depth], side) if name in self.on_side else (rows.columns[depth], row)
            codes[:, depth] = column[at] if len(column) > 1 else column[0]
        return codes

    def config_of(self, codes: Codes) -> TrialConfig:
        """The configuration with these codes."""
        return self._builder.config_of(codes)

    def _blocks(self, judged: Sequence[bool], most: int) -> Iterator[KnobRows]:
        """Rows of the judged knobs, with any value for the others; about `most` at a time."""
        steps = [self._builder.step(depth, judged[depth]) for depth in DEPTHS]
        waiting: list[KnobRows] = []
        for rows in self._walk(KnobRows((), 1), steps, most):
            checkpoint()
            waiting.append(rows)
            if sum(item.count for item in waiting) >= most:
                yield joined(waiting)
                waiting = []
        if waiting:
            yield joined(waiting)

    def _walk(self, rows: KnobRows, steps: Sequence["KnobStep"], most: int) -> Iterator[KnobRows]:
        """The rows that extend these, split into parts when there are too many."""
        while len(rows.columns) < len(SEARCH_ORDER) and 0 < rows.count <= most:
            depth = len(rows.columns)
            rows, _ = self._builder.extended(rows, steps[depth])
        if 0 < rows.count <= most:
            yield rows
        elif len(rows.columns) == len(SEARCH_ORDER):
            yield from (rows.take(index) for index in _parts(rows.count, most))
        else:
            for index in _parts(rows.count, most):
                yield from self._walk(rows.take(index), steps, most)


class KnobStep:
    """The possible values of one knob, by the combination of the knobs that it depends on."""

    def __init__(self, reads: Sequence[int], judged: bool, most: Sequence[int]) -> None:
        self.reads, self.judged = tuple(reads), judged
        self._strides = tuple(int(np.prod([most[read] for read in reads[position + 1 :]])) for position in range(len(reads)))
        size = int(np.prod([most[read] for read in reads]))
        # With more combinations, they are sorted.
        self._table = np.full(size, -1, dtype=np.int64) if size <= 1 << 20 else None
        self._sparse: dict[int, int] = {}
        """Combination -> its index, if there is no table."""
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._codes: list[int] = []

    def combinations(self, rows: KnobRows) -> Index:
        """The number of each row's combination; a single one if all are equal."""
        total = np.zeros(1, dtype=np.int64)
        for read, stride in zip(self.reads, self._strides, strict=True):
            total = total + rows.columns[read].astype(np.int64) * stride
        return total

    def unknown(self, combinations: Index) -> list[int]:
        """One row for each combination not yet evaluated."""
        if self._table is not None:
            rows = np.flatnonzero(self._table[combinations] < 0)
            return [int(rows[first]) for first in np.unique(combinations[rows], return_index=True)[1]]
        numbers, firsts = np.unique(combinations, return_index=True)
        return [int(row) for number, row in zip(numbers, firsts, strict=True) if int(number) not in self._sparse]

    def learn(self, combination: int, codes: Sequence[int]) -> None:
        """Store the possible values for a combination."""
        index = len(self._starts)
        self._starts.append(len(self._codes))
        self._counts.append(len(codes))
        self._codes += codes
        if self._table is not None:
            self._table[combination] = index
        else:
            self._sparse[combination] = index

    def places(self, combinations: Index) -> Index:
        """The index of each stored combination."""
        if self._table is not None:
            return self._table[combinations]
        numbers, inverse = np.unique(combinations, return_inverse=True)
        return np.array([self._sparse[int(number)] for number in numbers], dtype=np.int64)[inverse]

    def following(self, index: int) -> list[int]:
        """The possible values for the combination at an index."""
        start = self._starts[index]
        return self._codes[start : start + self._counts[index]]

    def counts(self, indices: Index) -> Index:
        """The numbers of possible values."""
        return np.array(self._counts, dtype=np.int64)[indices]

    def starts(self, indices: Index) -> Index:
        """Their start indices in `codes`."""
        return np.array(self._starts, dtype=np.int64)[indices]

    def codes(self, places: Index) -> Codes:
        """The values at these indices."""
        return np.array(self._codes, dtype=np.int16)[places]


def joined(parts: Sequence[KnobRows]) -> KnobRows:
    """Concatenate the rows, in order."""
    if len(parts) == 1:
        return parts[0]
    columns = []
    for pieces in zip(*(part.columns for part in parts), strict=True):
        same = all(len(piece) == 1 and piece[0] == pieces[0][0] for piece in pieces)
        wide = [np.broadcast_to(piece, part.count) for piece, part in zip(pieces, parts, strict=True)]
        columns.append(pieces[0] if same else np.concatenate(wide))
    return KnobRows(tuple(columns), sum(part.count for part in parts))


def varies(space: SearchSpace, depth: int) -> bool:
    """Whether the knob may vary; true also for a single non-default value, since an unused knob takes its default."""
    name = SEARCH_ORDER[depth]
    return tuple(space.domains.get(name, (getattr(space.base, name),))) != (KNOBS[name].default,)


def groups_of(lattice: Lattice, varying: Collection[int]) -> list[frozenset[int]]:
    """Groups of these knobs that depend on each other, directly or through others of them."""
    groups = [frozenset({depth}) for depth in varying]
    for depth in DEPTHS:
        tied = {depth, *lattice.reads(depth)}
        touched = [group for group in groups if group & tied]
        groups = [group for group in groups if not group & tied]
        groups += [frozenset().union(*touched)] if touched else []
    return groups


def _size(space: SearchSpace, group: Iterable[int]) -> int:
    return int(np.prod([float(len(space.domains.get(SEARCH_ORDER[depth], (0,)))) for depth in group]))


def _parts(count: int, most: int) -> Iterator[Index]:
    for first in range(0, count, most):
        yield np.arange(first, min(first + most, count))
