"""Every legal configuration of a space as arrays: millions, without a step in Python for each of them.

The configurations are built knob by knob, as `search_spaces.lattice` builds them, but for all at once: what a knob may be
depends on few others, so that its rules and conditions are asked once for each combination of those, and the answer is given
to every row that has it. So the rules stay what they are, written once, and the configurations are those of
`SearchSpace.enumerate`.

Knobs that no rule and no condition ties to the others are not multiplied out: they are a second axis. Equations over arrays of
shape (rows, 1) and (1, sides) then compute once what depends on one axis alone.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search_spaces.canonical import SEARCH_ORDER
from search_spaces.checkpoints import checkpoint
from search_spaces.knobs import KNOBS
from search_spaces.lattice import Lattice
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig, Value

Codes = NDArray[np.int16]
Index = NDArray[np.int64]

BLOCK = 65_536
"""Configurations of a block: few enough that its arrays stay in a processor's cache."""
LARGEST_TABLE = 1 << 20
"""Combinations of what a knob depends on that are looked up by their number; with more, they are sorted."""
SPARE = 3
"""Values that canonical form may add to a domain: the default, the parameter count, 0."""
DEPTHS = range(len(SEARCH_ORDER))


@dataclass(frozen=True, slots=True)
class Rows:
    """Values of knobs, row by row, as their places among `Grid.values`."""

    columns: tuple[Codes, ...]
    """One for each knob of SEARCH_ORDER: an element a row, or a single one where all rows have the same."""
    count: int

    def take(self, index: Index) -> "Rows":
        """The rows of an index."""
        return Rows(tuple(column if len(column) == 1 else column[index] for column in self.columns), len(index))

    def code(self, depth: int, row: int) -> int:
        """The place of the value that a knob has in a row."""
        column = self.columns[depth]
        return int(column[row if len(column) > 1 else 0])


class Grid:
    """The legal configurations of a space: every one of `rows` with every one of `sides`. Remembers what its rules said.

    Raises:
        SpaceTooLargeError: asking the rules takes more than the space's `most_steps`.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space, self._lattice = space, space.lattice
        self.values: tuple[list[Value], ...] = tuple([] for _ in SEARCH_ORDER)
        """Of each knob of SEARCH_ORDER the values that are met."""
        self._places: tuple[dict[Value, int], ...] = tuple({} for _ in SEARCH_ORDER)
        self._reads = tuple(self._lattice.reads(depth) for depth in DEPTHS)
        self._most = [len(space.domains.get(name, (0,))) + SPARE for name in SEARCH_ORDER]
        self.on_side = free_knobs(space)
        """The knobs of the second axis."""
        judged = _judged_on_side(self._lattice, self.on_side)
        self.sides = joined(list(self._blocks([depth in judged for depth in DEPTHS], 1 << 30)))
        """The second axis: one row where there is none."""
        self._judged = [depth not in judged for depth in DEPTHS]

    def blocks(self, configurations: int = BLOCK) -> Iterator[Rows]:
        """The first axis, in parts of so many configurations."""
        if self.sides.count:
            yield from self._blocks(self._judged, max(configurations // self.sides.count, 1))

    def codes(self, rows: Rows, name: str) -> Codes:
        """The places of one knob's values, of shape (rows, 1), (1, sides) or (1, 1)."""
        depth = SEARCH_ORDER.index(name)
        if name in self.on_side:
            return self.sides.columns[depth][np.newaxis, :]
        return rows.columns[depth][:, np.newaxis]

    def configs(self, rows: Rows) -> Iterator[TrialConfig]:
        """Every configuration of the rows: each row with each side."""
        for codes in self.codes_at(rows, np.arange(rows.count * self.sides.count)):
            yield self.config_of(codes)

    def config(self, rows: Rows, place: int) -> TrialConfig:
        """The configuration at a place: row x sides + side."""
        return self.config_of(self.codes_at(rows, np.array([place]))[0])

    def codes_at(self, rows: Rows, places: Index) -> Codes:
        """The codes of the configurations at these places: of shape (places, knobs)."""
        row, side = np.divmod(places, self.sides.count)
        found = np.empty((len(places), len(SEARCH_ORDER)), dtype=np.int16)
        for depth, name in enumerate(SEARCH_ORDER):
            column, at = (self.sides.columns[depth], side) if name in self.on_side else (rows.columns[depth], row)
            found[:, depth] = column[at] if len(column) > 1 else column[0]
        return found

    def config_of(self, codes: Codes) -> TrialConfig:
        """The configuration that has these codes."""
        return self._space.base.replace(
            {name: values[code] for name, values, code in zip(SEARCH_ORDER, self.values, codes, strict=True)}
        )

    def _blocks(self, judged: Sequence[bool], most: int) -> Iterator[Rows]:
        """Rows of the knobs that are judged, the others standing at any value; some `most` at a time."""
        steps = [_Step(self._reads[depth] if judged[depth] else (), self._most) for depth in DEPTHS]
        waiting: list[Rows] = []
        for rows in self._walk(Rows((), 1), steps, judged, most):
            checkpoint()
            waiting.append(rows)
            if sum(item.count for item in waiting) >= most:
                yield joined(waiting)
                waiting = []
        if waiting:
            yield joined(waiting)

    def _walk(self, rows: Rows, steps: Sequence["_Step"], judged: Sequence[bool], most: int) -> Iterator[Rows]:
        """The rows that start as these do; in parts as soon as there are too many."""
        while len(rows.columns) < len(SEARCH_ORDER) and 0 < rows.count <= most:
            depth = len(rows.columns)
            rows = self._longer(rows, steps[depth], judged[depth])
        if 0 < rows.count <= most:
            yield rows
        elif len(rows.columns) == len(SEARCH_ORDER):
            yield from (rows.take(index) for index in _parts(rows.count, most))
        else:
            for index in _parts(rows.count, most):
                yield from self._walk(rows.take(index), steps, judged, most)

    def _longer(self, rows: Rows, step: "_Step", judged: bool) -> Rows:
        """Every row once for each legal value of the next knob; once where that knob is not judged."""
        which = step.combinations(rows)
        for row in step.unknown(which):
            step.learn(int(which[row if len(which) > 1 else 0]), self._next(rows, row, judged))
        found = step.places(which)
        if len(found) == 1 and len(codes := step.following(int(found[0]))) == 1:
            return Rows((*rows.columns, np.array(codes, dtype=np.int16)), rows.count)
        counts = np.broadcast_to(step.counts(found), rows.count)
        source = np.repeat(np.arange(rows.count), counts)
        within = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.broadcast_to(step.starts(found), rows.count)
        return Rows((*rows.take(source).columns, step.codes(starts[source] + within)), len(source))

    def _next(self, rows: Rows, row: int, judged: bool) -> list[int]:
        """What may follow a row."""
        depth = len(rows.columns)
        prefix = [values[0] for values in self.values[:depth]]  # any, where nobody looks
        for place in self._reads[depth]:
            prefix[place] = self.values[place][rows.code(place, row)]
        values = self._lattice.legal_choices(tuple(prefix)) if judged else self._lattice.choices(tuple(prefix))[:1]
        return [self._place(depth, value) for value in values]

    def _place(self, depth: int, value: Value) -> int:
        places, values = self._places[depth], self.values[depth]
        if value not in places:
            places[value] = len(values)
            values.append(value)
        return places[value]


class _Step:
    """What one knob may be, by the combination of the knobs that it depends on."""

    def __init__(self, reads: Sequence[int], most: Sequence[int]) -> None:
        self._reads = tuple(reads)
        self._strides = tuple(int(np.prod([most[read] for read in reads[place + 1 :]])) for place in range(len(reads)))
        size = int(np.prod([most[read] for read in reads]))
        self._table = np.full(size, -1, dtype=np.int64) if size <= LARGEST_TABLE else None
        self._sparse: dict[int, int] = {}
        """Combination -> its place, where there is no table."""
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._codes: list[int] = []

    def combinations(self, rows: Rows) -> Index:
        """The number of each row's combination; one for all where they have the same."""
        total = np.zeros(1, dtype=np.int64)
        for read, stride in zip(self._reads, self._strides, strict=True):
            total = total + rows.columns[read].astype(np.int64) * stride
        return total

    def unknown(self, which: Index) -> list[int]:
        """A row for each combination that nothing is known of."""
        if self._table is not None:
            rows = np.flatnonzero(self._table[which] < 0)
            return [int(rows[first]) for first in np.unique(which[rows], return_index=True)[1]]
        numbers, firsts = np.unique(which, return_index=True)
        return [int(row) for number, row in zip(numbers, firsts, strict=True) if int(number) not in self._sparse]

    def learn(self, combination: int, codes: Sequence[int]) -> None:
        """Remember what may follow a combination."""
        place = len(self._starts)
        self._starts.append(len(self._codes))
        self._counts.append(len(codes))
        self._codes += codes
        if self._table is not None:
            self._table[combination] = place
        else:
            self._sparse[combination] = place

    def places(self, which: Index) -> Index:
        """The place of each combination among what is remembered."""
        if self._table is not None:
            return self._table[which]
        numbers, inverse = np.unique(which, return_inverse=True)
        return np.array([self._sparse[int(number)] for number in numbers], dtype=np.int64)[inverse]

    def following(self, place: int) -> list[int]:
        """What may follow the combination at a place."""
        start = self._starts[place]
        return self._codes[start : start + self._counts[place]]

    def counts(self, found: Index) -> Index:
        """How many values may follow."""
        return np.array(self._counts, dtype=np.int64)[found]

    def starts(self, found: Index) -> Index:
        """Where they begin in `codes`."""
        return np.array(self._starts, dtype=np.int64)[found]

    def codes(self, places: Index) -> Codes:
        """The values at these places."""
        return np.array(self._codes, dtype=np.int16)[places]


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all, in their order."""
    if len(parts) == 1:
        return parts[0]
    columns = []
    for pieces in zip(*(part.columns for part in parts), strict=True):
        same = all(len(piece) == 1 and piece[0] == pieces[0][0] for piece in pieces)
        wide = [np.broadcast_to(piece, part.count) for piece, part in zip(pieces, parts, strict=True)]
        columns.append(pieces[0] if same else np.concatenate(wide))
    return Rows(tuple(columns), sum(part.count for part in parts))


def free_knobs(space: SearchSpace) -> frozenset[str]:
    """The knobs that neither a rule nor a condition ties to the largest group of knobs that are tied to each other."""
    groups = _groups(space.lattice, [depth for depth in DEPTHS if _varies(space, depth)])
    largest = max(groups, key=lambda group: _size(space, group), default=frozenset())
    return frozenset(SEARCH_ORDER[depth] for group in groups for depth in group if group is not largest)


def _varies(space: SearchSpace, depth: int) -> bool:
    """Whether the knob may have several values: also one value, where the default stands for it when it does not matter."""
    name = SEARCH_ORDER[depth]
    return tuple(space.domains.get(name, (getattr(space.base, name),))) != (KNOBS[name].default,)


def _groups(lattice: Lattice, varying: Collection[int]) -> list[frozenset[int]]:
    """Knobs that are tied to each other, directly or through others."""
    groups = [frozenset({depth}) for depth in varying]
    for depth in DEPTHS:
        tied = {depth, *lattice.reads(depth)}
        touched = [group for group in groups if group & tied]
        groups = [group for group in groups if not group & tied]
        groups += [frozenset().union(*touched)] if touched else []
    return groups


def _size(space: SearchSpace, group: Iterable[int]) -> int:
    return int(np.prod([float(len(space.domains.get(SEARCH_ORDER[depth], (0,)))) for depth in group]))


def _judged_on_side(lattice: Lattice, on_side: Collection[str]) -> set[int]:
    """The places whose rules and conditions look at knobs of the second axis."""
    side = {SEARCH_ORDER.index(name) for name in on_side}
    return {depth for depth in DEPTHS if side & {depth, *lattice.reads(depth)}}


def _parts(count: int, most: int) -> Iterator[Index]:
    for first in range(0, count, most):
        yield np.arange(first, min(first + most, count))
