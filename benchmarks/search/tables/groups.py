"""Groups of a table on which strategies are compared, and the rows for fitting before each is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.knowledge.row import RowOutcome, TableRow, blinded
from autotune.knowledge.table import Skipped
from benchmarks.prediction.scoring.configurations import CONFIGURATION_FIELDS
from benchmarks.prediction.scoring.contract import Flags, Floats
from benchmarks.prediction.scoring.facts import Candidate, Facts, GroupKey
from benchmarks.prediction.scoring.folds import Calibration, Fold, leave_group_out, leave_source_out
from benchmarks.prediction.scoring.outcomes import Fate
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.search.tables.table_space import TableConfig, TableSpace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """A search problem, and the results of its trials."""

    key: GroupKey
    space: TableSpace
    candidates: tuple[Candidate, ...]
    """In the order of the space's configurations."""
    asked: tuple[TableRow, ...]
    """For each candidate its configuration, without results."""
    work: Floats
    """For each candidate the work per step that a rate counts."""
    said_out_of_memory: tuple[bool, ...]
    """Whether the table itself states that a candidate ran out of memory; labels are later guesses, used only for scores."""

    @property
    def rows(self) -> int:
        """Rows of all candidates."""
        return sum(len(candidate.rows) for candidate in self.candidates)

    @property
    def configs(self) -> Sequence[TableConfig]:
        """The candidates' configurations."""
        return self.space.configs

    @property
    def best(self) -> float:
        """Highest measured throughput."""
        return max(candidate.rate for candidate in self.candidates if candidate.repeats)

    @property
    def timed(self) -> int:
        """Candidates that ran and have a time."""
        return _timed(self.candidates)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationSplit:
    """Rows for fitting coefficients, and the indices of the groups that are then predicted."""

    fitted: tuple[TableRow, ...] | None
    """None: the shipped coefficients."""
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """The groups of a table, in its order, and the rows excluded from them."""

    groups: tuple[Group, ...]
    splits: tuple[CalibrationSplit, ...]
    skipped: tuple[Skipped, ...]
    """Rows of groups that cannot be predicted."""
    small: dict[GroupKey, int]
    """Groups with too few timed candidates -> how many they have."""


def gather_groups(facts: Facts, predictor: TablePredictor, calibrate: Calibration, min_timed: int) -> Gathered:
    """Every group with enough timed candidates; none of its rows is used to fit the coefficients that predict it.

    Rows that the predictor cannot represent are excluded for all strategies, so that all choose from the same candidates.
    """
    refusals = predictor.refusals([blinded(row) for row in facts.rows])
    usable = np.array([why is None for why in refusals], dtype=bool)
    found = {key: _candidates(facts, key, usable) for key in facts.candidates}
    groups = tuple(_group(facts, key, each) for key, each in found.items() if _timed(each) >= max(min_timed, 1))
    skipped = [
        Skipped(row_id=row.row_id, line=row.line, reason=why)
        for row, why in zip(facts.rows, refusals, strict=True)
        if why is not None and row.rank_group
    ]
    return Gathered(
        groups=groups,
        splits=_splits(facts, usable, calibrate, min_timed, groups),
        skipped=tuple(skipped),
        small={key: _timed(each) for key, each in found.items() if _timed(each) < max(min_timed, 1)},
    )


def _candidates(facts: Facts, key: GroupKey, usable: Flags) -> tuple[Candidate, ...]:
    """The candidates that can be predicted and that failed or have a time: a trial of others would be uninformative.

    In the order of their configurations, so that a table sorted by speed does not leak the result.
    """
    known = [
        candidate
        for candidate in facts.candidates[key]
        if usable[list(candidate.rows)].all() and (np.isfinite(candidate.rate) or _failed(candidate))
    ]
    return tuple(sorted(known, key=lambda candidate: _order(facts.rows[candidate.rows[0]])))


def _failed(candidate: Candidate) -> bool:
    return not candidate.repeats and candidate.fate is not Fate.RAN


def _order(row: TableRow) -> tuple[Any, ...]:
    """Sort key with blanks last."""
    values = [getattr(row, name) for name in (*CONFIGURATION_FIELDS, "kernel")]
    return tuple((value is None, 0 if value is None else value) for value in values)


def _timed(candidates: Sequence[Candidate]) -> int:
    return sum(candidate.repeats > 0 for candidate in candidates)


def _splits(
    facts: Facts, usable: Flags, calibrate: Calibration, min_timed: int, groups: Sequence[Group]
) -> tuple[CalibrationSplit, ...]:
    if calibrate is Calibration.NONE:
        return (CalibrationSplit(fitted=None, groups=tuple(range(len(groups)))),)
    folds = (
        leave_source_out(facts, usable)
        if calibrate is Calibration.LEAVE_SOURCE_OUT
        else leave_group_out(facts, usable, min_timed)
    )
    splits = []
    for fold in folds:
        if ours := tuple(place for place, group in enumerate(groups) if _is_of(group, fold)):
            splits.append(CalibrationSplit(fitted=tuple(facts.rows[position] for position in fold.fitted), groups=ours))
    return tuple(splits)


def _is_of(group: Group, fold: Fold) -> bool:
    rows = {position for candidate in group.candidates for position in candidate.rows}
    return rows.issubset(fold.predicted) and rows.isdisjoint(fold.fitted)


def _group(facts: Facts, key: GroupKey, candidates: tuple[Candidate, ...]) -> Group:
    first = [candidate.rows[0] for candidate in candidates]
    asked = tuple(blinded(facts.rows[position]) for position in first)
    return Group(
        key=key,
        space=TableSpace(asked),
        candidates=candidates,
        asked=asked,
        work=facts.work[first],
        said_out_of_memory=tuple(
            any(facts.rows[position].outcome is RowOutcome.OOM for position in candidate.rows) for candidate in candidates
        ),
    )
