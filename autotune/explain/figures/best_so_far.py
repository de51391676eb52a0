"""The best so far, over the trials and over the time since the first one started."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from autotune.explain.figures.figure import FigureUnit, cell_text, column, counted, table
from autotune.explain.figures.source import FigureSource
from autotune.objective.ranking import Ranking, peak_bytes
from autotune.request.job_fields import Objective
from autotune.wire.figures import Axis, Figure, Mark
from storage.records import TrialRecord

NAME, TITLE = "best_so_far", "Best so far"


def best_so_far(source: FigureSource) -> Figure:
    """Search trials in the order of their numbers, and in the order in which they ended."""
    searched = source.snapshot.searched
    if not searched or source.session is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking())
    ranking = source.session.ranking
    least = ranking.objective is Objective.MEMORY
    unit = FigureUnit.BYTES if least else FigureUnit.RATE
    values = [_value(source, ranking, trial) for trial in searched]
    best = _running(values, least)
    if best[-1] is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking("trial that may win"))
    began = min((trial.started for trial in searched if trial.started), default=None)
    trials = table(
        "trials",
        "a search trial, in the order in which they were chosen",
        [
            column("trial", "trial", [trial.number for trial in searched]),
            column("outcome", "outcome", [trial.outcome for trial in searched]),
            column("seconds", "ended after", [_after(trial, began) for trial in searched], FigureUnit.SECONDS),
            column("value", "its own", values, unit),
            column("best", "best so far", best, unit),
        ],
    )
    ran = [trial for trial in searched if trial.started and trial.finished]
    ended = sorted(ran, key=lambda trial: _after(trial, began) or 0.0)
    lasting = _running([_value(source, ranking, trial) for trial in ended], least)
    over_time = table(
        "over_time",
        "a search trial that ran, in the order in which they ended",
        [
            column("trial", "trial", [trial.number for trial in ended]),
            column("seconds", "ended after", [_after(trial, began) for trial in ended], FigureUnit.SECONDS),
            column("best", "best so far", lasting, unit),
        ],
    )
    return Figure(
        name=NAME,
        title=TITLE,
        summary=_summary(searched, values, best, unit),
        x=Axis(title="trial", column="trial"),
        y=Axis(title="least peak of a rank" if least else "throughput", unit=unit, column="best"),
        tables=(trials, over_time),
        marks=_baseline(source, ranking, unit),
    )


def _value(source: FigureSource, ranking: Ranking, trial: TrialRecord) -> float | None:
    """The value of the objective; None: the trial may not win."""
    if not ranking.may_win(trial):
        return None
    if ranking.objective is Objective.MEMORY:
        return float(peak_bytes(trial))
    return ranking.rate(trial) if source.evidence is None else source.evidence.verdict.standings.ranked_rate(trial)


def _running(values: Iterable[float | None], least: bool) -> list[float | None]:
    """For each position, the best value up to it."""
    running_best: list[float | None] = []
    best: float | None = None
    for value in values:
        if value is not None and (best is None or (value < best if least else value > best)):
            best = value
        running_best.append(best)
    return running_best


def _after(trial: TrialRecord, began: datetime | None) -> float | None:
    if trial.finished is None or trial.started is None or began is None:
        return None
    return (trial.finished - began).total_seconds()


def _baseline(source: FigureSource, ranking: Ranking, unit: FigureUnit) -> tuple[Mark, ...]:
    baseline = source.evidence.verdict.baseline if source.evidence is not None else None
    value = _value(source, ranking, baseline) if baseline is not None else None
    if value is None:
        return ()
    return (Mark(axis="y", name="baseline", title=f"baseline {cell_text(value, unit)}", value=value),)


def _summary(
    searched: Sequence[TrialRecord], values: Sequence[float | None], best: Sequence[float | None], unit: FigureUnit
) -> str:
    index = next(index for index, value in enumerate(best) if value == best[-1])
    winning = sum(value is not None for value in values)
    since = len(searched) - 1 - index
    reached = f"Trial {searched[index].number} reached {cell_text(best[-1], unit)}{' samples/s' * (unit is FigureUnit.RATE)}"
    after = f"; the {counted(since, 'trial')} after it found nothing better" if since else ", the last one so far"
    return f"{reached}, the best of {counted(len(searched), 'trial')} ({winning:,} may win){after}."
