"""Calibration modes: the rows for fitting before each set of rows is predicted."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from autotune.knowledge.row import TableRow
from benchmarks.prediction.scoring.configurations import configuration_of
from benchmarks.prediction.scoring.contract import Flags
from benchmarks.prediction.scoring.facts import Facts

DRAWS = 20
"""Random draws of calibration rows; the median of their figures is reported."""


class Calibration(StrEnum):
    """The rows on which the predictor is fitted.

    - none: the shipped coefficients.
    - leave-group-out: every row except those of the predicted group.
    - leave-source-out: every row except those of the predicted source.
    - few-rows: only a few measured rows of the predicted source.
    """

    NONE = "none"
    LEAVE_GROUP_OUT = "leave-group-out"
    LEAVE_SOURCE_OUT = "leave-source-out"
    FEW_ROWS = "few-rows"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fold:
    """Positions of the rows to fit on and of those to predict."""

    fitted: tuple[int, ...]
    predicted: tuple[int, ...]


def leave_source_out(facts: Facts, usable: Flags) -> list[Fold]:
    """A fold for each source."""
    return _leave_out([row.source for row in facts.rows], usable)


def leave_group_out(facts: Facts, usable: Flags, min_timed: int) -> list[Fold]:
    """A fold for each group that can be ranked, and one for each source's model of the rows without such a group.

    Rows without a group that have the same source, model, cluster and kernel as the predicted rows are not fitted on, and
    vice versa: they may belong to the same group without stating it.
    """
    timed = Counter(
        _group(row) for row, seconds in zip(facts.rows, facts.seconds, strict=True) if row.rank_group and np.isfinite(seconds)
    )
    keys = [_group(row) if timed[_group(row)] >= min_timed else (row.source, row.model_name) for row in facts.rows]
    settings = [(row.source, row.model_name, row.gpu_type, row.num_gpus, row.kernel) for row in facts.rows]
    loose = [row.rank_group is None for row in facts.rows]
    folds = []
    for fold in _leave_out(keys, usable):
        ours = {settings[position] for position in fold.predicted}
        loose_ours = {settings[position] for position in fold.predicted if loose[position]}
        fitted = [position for position in fold.fitted if settings[position] not in (ours if loose[position] else loose_ours)]
        folds.append(Fold(fitted=tuple(fitted), predicted=fold.predicted))
    return folds


@dataclass(frozen=True, slots=True, kw_only=True)
class TooFew:
    """A source that few-rows cannot score."""

    rows: tuple[int, ...]
    measured: int
    """Number of usable measured configurations."""


def few_rows(facts: Facts, usable: Flags, wanted: int, seed: int) -> Iterator[list[Fold] | TooFew]:
    """For each source one fold per draw, or `TooFew`. Repeats of a drawn row are not predicted."""
    for number, positions in enumerate(facts.sources().values()):
        ours = [position for position in positions if usable[position]]
        configurations: dict[Hashable, list[int]] = defaultdict(list)
        for position in _measured(facts, ours):
            configurations[configuration_of(facts.rows[position])].append(position)
        if len(configurations) <= wanted:
            yield TooFew(rows=tuple(ours), measured=len(configurations))
            continue
        random = np.random.default_rng([seed, number])
        choices = list(configurations.values())
        drawn = [random.choice(len(choices), size=wanted, replace=False) for _ in range(DRAWS)]
        yield [_few(facts.rows, ours, [choices[each][0] for each in draw]) for draw in drawn]


def _few(rows: Sequence[TableRow], ours: Sequence[int], drawn: Sequence[int]) -> Fold:
    known = {configuration_of(rows[position]) for position in drawn}
    predicted = tuple(position for position in ours if configuration_of(rows[position]) not in known)
    return Fold(fitted=tuple(sorted(drawn)), predicted=predicted)


def _measured(facts: Facts, positions: Iterable[int]) -> list[int]:
    """Rows with time and memory; if a source has none, with a time; if it has none, with memory."""
    timed = np.isfinite(facts.seconds) & ~facts.pathological
    bearing = np.isfinite(facts.bytes)
    for wanted in (timed & bearing, timed, bearing):
        if found := [position for position in positions if wanted[position]]:
            return found
    return []


def _group(row: TableRow) -> tuple[str, str | None, bool]:
    # The last element distinguishes a group from a source's model.
    return row.source, row.rank_group, True


def _leave_out(keys: Sequence[Hashable], usable: Flags) -> list[Fold]:
    members: dict[Hashable, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        if usable[position]:
            members[key].append(position)
    everyone = [position for positions in members.values() for position in positions]
    return [
        Fold(fitted=tuple(sorted(set(everyone).difference(positions))), predicted=tuple(positions))
        for positions in members.values()
    ]
