"""Every search trial as a line through the values of the varying knobs to its samples/s."""

from autotune.explain.figures.figure import FigureUnit, column, counted, table, varying
from autotune.explain.figures.source import FigureSource
from autotune.objective.ranking import peak_bytes
from autotune.wire.figures import Column, Figure
from search_spaces.knob_values import value_text

NAME, TITLE = "parallel_coordinates", "Knobs of the measured trials"


def parallel_coordinates(source: FigureSource) -> Figure:
    """Search trials that have ended, with a column for each knob in which they differ, in display order."""
    searched = source.snapshot.searched
    knobs = varying(searched)
    if not searched or source.session is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking())
    if not knobs:
        summary = f"There is {counted(len(searched), 'trial')}, and so no knob has two values yet."
        return Figure(name=NAME, title=TITLE, summary=summary)
    rates = [source.rate_of(trial) for trial in searched]
    trials = table(
        "trials",
        "a search trial",
        [
            column("trial", "trial", [trial.number for trial in searched]),
            column("outcome", "outcome", [trial.outcome for trial in searched]),
            *(Column(name=name, title=name, values=tuple(getattr(trial.config, name) for trial in searched)) for name in knobs),
            column("samples_per_second", "samples/s", [rate.mean if rate else None for rate in rates], FigureUnit.RATE),
            column("peak_bytes", "peak a rank", [peak_bytes(trial) or None for trial in searched], FigureUnit.BYTES),
        ],
    )
    vary = "varies" if len(knobs) == 1 else "vary"
    summary = f"{counted(len(searched), 'trial')} over {counted(len(knobs), 'knob')} that {vary}"
    best = source.evidence.config if source.evidence is not None else None
    if best is not None:
        summary += f"; the best has {', '.join(f'{name}={value_text(getattr(best, name))}' for name in knobs[:4])}"
        summary += " and more" if len(knobs) > 4 else ""
    return Figure(name=NAME, title=TITLE, summary=f"{summary}.", tables=(trials,))
