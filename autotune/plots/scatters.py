"""Scatter plots: a marker for each trial."""

from collections.abc import Sequence
from typing import Any

from autotune.explain.figures.figure import Unit
from autotune.explain.figures.palette import look_of
from autotune.plots.look import (
    Specification,
    Trace,
    axis,
    color,
    escaped,
    mark_line,
    scale_of,
    scaled,
    specification,
    texts,
    thinned,
)
from autotune.wire.figures import Figure, Mark, Table

WIDE = 20.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
FAR = 3.0
"""Multiple of the largest peak above which a limit is written beside the plot instead of drawn as a line."""
_HINTS = ("trial", "outcome", "placed", "samples_per_second", "low", "high", "peak_bytes", "config")


def throughput_memory(figure: Figure) -> Specification:
    """Shape and colour show the outcome, hollow marks are predicted; lines show the front and the limit."""
    trials, edge = figure.table("trials"), figure.table("front")
    scale, unit = scale_of(trials.column("peak_bytes"), Unit.BYTES)
    rows = thinned(trials, ("samples_per_second", "peak_bytes"), ("best", "baseline", "front"))
    data = [*_by_outcome(trials, rows, scale), *_front(edge, scale), *_named(trials, scale)]
    peaks = [float(peak) for peak in trials.column("peak_bytes") if isinstance(peak, int | float)]
    near = [mark for mark in figure.marks if mark.value <= FAR * max(peaks, default=mark.value)]
    lines = [mark_line(mark, scale) for mark in near]
    return specification(
        data, 420, shapes=[line for line, _ in lines],
        annotations=[*_below_each_other(lines), *_beyond([mark for mark in figure.marks if mark not in near])],
        xaxis=axis(f"peak memory of a rank, {unit}", **_kind([*peaks, *(mark.value for mark in near)], scale)),
        yaxis=axis("samples/s"), margin={"l": 56, "r": 16, "t": 76, "b": 48},
    )  # fmt: skip


def predicted_measured(figure: Figure) -> Specification:
    """Samples/s at the top, peaks below, each with the line of equality."""
    trials = figure.table("trials")
    rows = thinned(trials)
    scale, unit = scale_of([*trials.column("predicted_peak_bytes"), *trials.column("measured_peak_bytes")], Unit.BYTES)
    hints = texts(trials, ("trial", "predicted", "measured", "predicted_peak_bytes", "measured_peak_bytes"), rows)
    data: list[Trace] = []
    layout: dict[str, Any] = {}
    panels = (
        ("predicted", "measured", 1.0, "samples/s", ""),
        ("predicted_peak_bytes", "measured_peak_bytes", scale, unit, "2"),
    )
    for predicted, measured, by, name, place in panels:
        first = _picked(scaled(trials.column(predicted), by), rows)
        second = _picked(scaled(trials.column(measured), by), rows)
        known = [value for pair in zip(first, second, strict=True) if None not in pair for value in pair if value]
        if not known:
            continue
        kind: dict[str, Any] = {"type": "log", "dtick": "D2"} if max(known) > WIDE * min(known) else {}
        ends = [min(known) * 0.9, max(known) * 1.1]
        data += [
            {"type": "scatter", "mode": "lines", "x": ends, "y": ends, "xaxis": f"x{place}", "yaxis": f"y{place}",
                "name": "equal",
             "line": {"color": color("line-strong"), "dash": "dash", "width": 1.5}, "hoverinfo": "skip",
             "showlegend": not place},
            {"type": "scatter", "mode": "markers", "x": first, "y": second, "xaxis": f"x{place}", "yaxis": f"y{place}",
             "name": "trial", "hovertext": hints, "hoverinfo": "text", "showlegend": not place,
             "marker": {"color": color("ok"), "size": 8, "opacity": 0.8}},
        ]  # fmt: skip
        layout[f"xaxis{place}"] = axis(f"predicted {name}", anchor=f"y{place}", **kind)
        layout[f"yaxis{place}"] = axis(f"measured {name}", domain=[0, 0.42] if place else [0.58, 1], anchor=f"x{place}", **kind)
    return specification(data, 620, **layout)


def _by_outcome(trials: Table, rows: Sequence[int], scale: float) -> list[Trace]:
    groups: dict[tuple[object, object], list[int]] = {}
    for row in rows:
        groups.setdefault((trials.column("outcome")[row], trials.column("placed")[row]), []).append(row)
    peaks, rates = scaled(trials.column("peak_bytes"), scale), scaled(trials.column("samples_per_second"), 1.0)
    found = []
    for (outcome, placed), own in sorted(groups.items(), key=lambda item: -len(item[1])):
        look, hollow = look_of(outcome), placed == "predicted"
        found.append(
            {
                "type": "scatter", "mode": "markers", "x": _picked(peaks, own), "y": _picked(rates, own),
                "name": look.label + (" (placed by prediction)" if hollow else ""), "hoverinfo": "text",
                "hovertext": texts(trials, _HINTS, own),
                "marker": {
                    "symbol": look.symbol + ("-open" if hollow else ""), "color": color(look.color), "size": 9,
                    "opacity": 0.85, "line": {"width": 2 if hollow else 0, "color": color(look.color)},
                },
            }
        )  # fmt: skip
    return found


def _front(edge: Table, scale: float) -> list[Trace]:
    if len(edge) < 2:
        return []
    return [
        {
            "type": "scatter", "mode": "lines", "x": scaled(edge.column("peak_bytes"), scale),
            "y": scaled(edge.column("samples_per_second"), 1.0), "name": "Pareto front", "hoverinfo": "skip",
            "line": {"color": color("front"), "width": 2, "shape": "vh"},
        }
    ]  # fmt: skip


def _named(trials: Table, scale: float) -> list[Trace]:
    """Symbols around the baseline and the best, so that their own markers stay visible."""
    found = []
    for name, symbol, tone in (("baseline", "square-open", "text"), ("best", "star", "best")):
        own = [row for row, is_it in enumerate(trials.column(name)) if is_it and trials.column("samples_per_second")[row]]
        if own:
            found.append(
                {
                    "type": "scatter", "mode": "markers", "x": _picked(scaled(trials.column("peak_bytes"), scale), own),
                    "y": _picked(scaled(trials.column("samples_per_second"), 1.0), own), "name": name, "hoverinfo": "text",
                    "hovertext": [f"<b>{name}</b><br>{text}" for text in texts(trials, _HINTS, own)],
                    "marker": {"symbol": symbol, "size": 17, "color": color(tone),
                        "line": {"width": 2, "color": color("text")}},
                }
            )  # fmt: skip
    return found


def _below_each_other(lines: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Labels of the lines, stacked so that they do not overlap."""
    return [name | {"yshift": -18 * place} for place, (_, name) in enumerate(lines)]


def _beyond(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """A label for limits so far away that the trials would shrink to one spot."""
    if not marks:
        return []
    return [
        {
            "text": escaped(f"{', '.join(mark.title for mark in marks)} →"), "x": 1, "xref": "paper", "xanchor": "right",
            "y": 0, "yref": "paper", "yanchor": "bottom", "showarrow": False,
            "font": {"size": 11, "color": color("infeasible")}, "bgcolor": color("surface"), "borderpad": 2,
        }
    ]  # fmt: skip


def _kind(values: Sequence[float], scale: float) -> dict[str, Any]:
    """A logarithmic axis if the values differ by a large factor, else a range with margins at both ends."""
    known = [value for value in values if value > 0]
    if known and max(known) > WIDE * min(known):
        return {"type": "log", "dtick": "D2"}
    room = (max(known) - min(known)) * 0.08 or max(known) * 0.1 if known else 0.0
    return {"range": [(min(known) - room) / scale, (max(known) + room) / scale]} if known else {}


def _picked(values: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    return [values[row] for row in rows]
