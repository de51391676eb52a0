"""Groups of a table that strategies are held against, each with what may be predicted of it without its own rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.table_predictor import TablePredictor
from autotune.search_benchmark.table_forecaster import TableForecaster
from autotune.search_benchmark.table_space import TableConfig, TableSpace
from autotune.validation.contract import Flags
from autotune.validation.facts import Candidate, Facts, GroupKey
from autotune.validation.folds import Calibration, Fold, leave_group_out, leave_source_out
from autotune.validation.outcomes import Fate
from autotune.validation.row import blinded
from autotune.validation.table import Skipped

Progress = Callable[[int, int], None]
"""Told after each group how many are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """What is searched, what is known of it before, and what trials of it give."""

    key: GroupKey
    rows: int
    space: TableSpace
    candidates: tuple[Candidate, ...]
    """In the order of the space's configurations."""
    forecaster: TableForecaster

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
        return sum(candidate.repeats > 0 for candidate in self.candidates)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """The groups of a table, and the rows that are in none of them."""

    groups: tuple[Group, ...]
    skipped: tuple[Skipped, ...]


def gather_groups(
    facts: Facts, predictor: TablePredictor, calibrate: Calibration, min_timed: int, progress: Progress | None = None
) -> Gathered:
    """Every group with enough timed candidates; coefficients are fitted without any of its rows.

    Rows that the predictor cannot represent are no candidates of any strategy, so that all choose from the same ones.
    """
    asked = [blinded(row) for row in facts.rows]
    refusals = predictor.refusals(asked)
    usable = np.array([why is None for why in refusals], dtype=bool)
    wanted = {
        key: found for key in facts.candidates if len(found := _candidates(facts, key, usable)) and _timed(found) >= min_timed
    }
    groups: list[Group] = []
    for calibrated, keys in _calibrations(facts, usable, calibrate, min_timed, wanted, predictor):
        for key in keys:
            groups.append(_group(facts, calibrated, key, wanted[key]))
            if progress:
                progress(len(groups), len(wanted))
    order = {key: place for place, key in enumerate(wanted)}
    skipped = [
        Skipped(row_id=row.row_id, line=row.line, reason=why)
        for row, why in zip(facts.rows, refusals, strict=True)
        if why is not None and row.rank_group
    ]
    return Gathered(groups=tuple(sorted(groups, key=lambda group: order[group.key])), skipped=tuple(skipped))


def _candidates(facts: Facts, key: GroupKey, usable: Flags) -> tuple[Candidate, ...]:
    """Those that can be predicted, and that either failed or have a time: of others a trial would tell nothing."""
    return tuple(
        candidate
        for candidate in facts.candidates[key]
        if usable[list(candidate.rows)].all() and (candidate.repeats or candidate.fate is not Fate.RAN)
    )


def _timed(candidates: Sequence[Candidate]) -> int:
    return sum(candidate.repeats > 0 for candidate in candidates)


def _calibrations(
    facts: Facts, usable: Flags, calibrate: Calibration, min_timed: int, wanted: "dict[GroupKey, tuple[Candidate, ...]]",
    predictor: TablePredictor,
) -> Iterator[tuple[TablePredictor, list[GroupKey]]]:  # fmt: skip
    """Each predictor with the groups that it predicts."""
    if calibrate is Calibration.NONE:
        yield predictor, list(wanted)
        return
    folds = (
        leave_source_out(facts, usable)
        if calibrate is Calibration.LEAVE_SOURCE_OUT
        else leave_group_out(facts, usable, min_timed)
    )
    left = dict.fromkeys(wanted)
    for fold in folds:
        ours = [key for key in left if _is_of(wanted[key], fold)]
        for key in ours:
            del left[key]
        if ours:
            yield predictor.calibrated([facts.rows[position] for position in fold.fitted]), ours


def _is_of(candidates: Sequence[Candidate], fold: Fold) -> bool:
    rows = {position for candidate in candidates for position in candidate.rows}
    return not rows.isdisjoint(fold.predicted) and rows.isdisjoint(fold.fitted)


def _group(facts: Facts, predictor: TablePredictor, key: GroupKey, candidates: tuple[Candidate, ...]) -> Group:
    given = TableSpace([blinded(facts.rows[candidate.rows[0]]) for candidate in candidates])
    # Tables are often sorted by what was measured: no strategy, and no tie of theirs, may see their order.
    order = sorted(range(len(candidates)), key=lambda place: given.configs[place].hash)
    candidates = tuple(candidates[place] for place in order)
    rows = [blinded(facts.rows[candidate.rows[0]]) for candidate in candidates]
    space = TableSpace(rows)
    work = np.array([facts.work[candidate.rows[0]] for candidate in candidates])
    return Group(
        key=key,
        rows=sum(len(candidate.rows) for candidate in candidates),
        space=space,
        candidates=candidates,
        forecaster=TableForecaster(space.configs, rows, work, predictor),
    )
