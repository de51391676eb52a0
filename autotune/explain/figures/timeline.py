"""When and on which node each trial ran."""

from autotune.explain.figures.figure import FigureUnit, column, counted, percent, seconds_text, table
from autotune.explain.figures.source import FigureSource
from autotune.wire.figures import Axis, Figure

NAME, TITLE = "timeline", "Trials on nodes"
UNKNOWN = "node not reported"


def timeline(source: FigureSource) -> Figure:
    """Trials of every purpose that started; a running trial has no end yet."""
    placements = source.store.attempts.placements(source.job.id)
    ran = [trial for trial in source.snapshot.trials if trial.number in placements]
    if not ran:
        return Figure(name=NAME, title=TITLE, summary=source.lacking("trial that started"))
    starts = {trial.number: trial.started or placements[trial.number].started for trial in ran}
    began = min(starts.values())
    nodes = [placements[trial.number].node or UNKNOWN for trial in ran]
    ends = [(trial.finished - began).total_seconds() if trial.finished else None for trial in ran]
    attempts = table(
        "attempts",
        "a trial's last attempt",
        [
            column("node", "node", nodes),
            column("trial", "trial", [trial.number for trial in ran]),
            column("attempt", "attempt", [trial.attempts for trial in ran]),
            column("outcome", "outcome", [trial.outcome for trial in ran]),
            column("purpose", "purpose", [trial.purpose for trial in ran]),
            column("started", "started", [(starts[trial.number] - began).total_seconds() for trial in ran], FigureUnit.SECONDS),
            column("finished", "ended", ends, FigureUnit.SECONDS),
        ],
    )
    busy = sum((trial.finished - starts[trial.number]).total_seconds() for trial in ran if trial.finished)
    whole = max((end for end in ends if end is not None), default=0.0)
    places = len(set(nodes))
    summary = f"{counted(len(ran), 'trial')} on {counted(places, 'node')} in {seconds_text(whole)}"
    if whole:
        at_once = busy / whole
        summary += f", {at_once:.2g} at a time on average" if at_once >= 1.05 else f", which ran {percent(at_once)} of it"
    return Figure(
        name=NAME,
        title=TITLE,
        summary=f"{summary}.",
        x=Axis(title="since the first trial started", unit=FigureUnit.SECONDS, column="started"),
        y=Axis(title="node", column="node"),
        tables=(attempts,),
    )
