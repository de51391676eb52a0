"""Line plots: progress, parallel coordinates, response curves."""

from typing import Any

from autotune.explain.figures.figure import cell_text
from autotune.explain.figures.palette import STEPS, look_of
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
from autotune.wire.figures import Figure, Table
from search_spaces.knob_values import KNOBS, value_text

MOST_CURVES = 8
"""Most knobs whose curves are drawn: the most informative ones."""
MOST_LINES = 250
CURVE, CURVE_HEAD, CURVE_FOOT = 200, 26, 44
"""Pixels of a knob's plot, and the parts of these for its name and for its value labels."""
ROW = 74
"""Pixels of a knob's row in the parallel coordinates."""


def best_so_far(figure: Figure) -> Specification:
    """Over the trials at the top, over time below."""
    trials, over_time = figure.table("trials"), figure.table("over_time")
    scale, unit = scale_of(trials.column("best"), figure.y.unit if figure.y else trials.columns[4].unit)
    rows = thinned(trials, ("value",))
    data: list[Trace] = [
        {
            "type": "scatter", "mode": "markers", "x": [trials.column("trial")[row] for row in rows],
            "y": _picked(scaled(trials.column("value"), scale), rows),
            "name": "its own", "hoverinfo": "text", "hovertext": texts(trials, ("trial", "outcome", "value"), rows),
            "marker": {"color": color("ok"), "size": 7, "opacity": 0.7},
        },
        _staircase(trials, "trial", 1.0, scale, {"name": "best so far"}),
    ]  # fmt: skip
    times, time_unit = scale_of(over_time.column("seconds"), over_time.columns[1].unit)
    layout: dict[str, Any] = {
        "xaxis": axis("trial", anchor="y", rangemode="tozero"),
        "yaxis": axis(unit, domain=[0.6, 1] if len(over_time) else [0, 1], rangemode="tozero"),
    }
    if len(over_time):
        data.append(_staircase(over_time, "seconds", times, scale, {"xaxis": "x2", "yaxis": "y2", "showlegend": False}))
        layout["xaxis2"] = axis(f"time since the first trial started, {time_unit}", anchor="y2", rangemode="tozero")
        layout["yaxis2"] = axis(unit, domain=[0, 0.38], anchor="x2", rangemode="tozero")
    lines = [mark_line(mark, scale, x=1.0) for mark in figure.marks]
    return specification(data, 560, shapes=[line for line, _ in lines], annotations=[name for _, name in lines], **layout)


def parallel_coordinates(figure: Figure) -> Specification:
    """A row for each knob, from top to bottom, and a line for each trial through its values down to its samples/s."""
    trials = figure.table("trials")
    knobs = [column for column in trials.columns if column.name not in ("trial", "outcome", "samples_per_second", "peak_bytes")]
    rows = thinned(trials, ("samples_per_second",), most=MOST_LINES)
    rates = [float(rate) for rate in trials.column("samples_per_second") if isinstance(rate, int | float)]
    low, high = (min(rates), max(rates)) if rates else (0.0, 1.0)
    depth = len(knobs)
    labels: list[dict[str, Any]] = []
    places: list[dict[Any, float]] = []
    for row, knob in enumerate(knobs):
        values = _in_order(knob.name, set(knob.values))
        places.append({value: (place + 0.5) / len(values) for place, value in enumerate(values)})
        labels.append(_name(knob.name.replace("_", " "), depth - row))
        labels += [_tick(_short(value), places[-1][value], depth - row) for value in values]
    labels.append(_name("samples/s", 0))
    labels += [_tick(cell_text(low + (high - low) * share, trials.columns[-2].unit), share, 0) for share in (0.0, 0.5, 1.0)]
    groups: dict[int, list[int]] = {}
    for row in rows:
        rate = float(trials.column("samples_per_second")[row] or 0.0)
        groups.setdefault(_step(rate, low, high), []).append(row)
    data = [
        _strands(trials, [knob.values for knob in knobs], places, own, (low, high), step)
        for step, own in sorted(groups.items())
    ]
    return specification(
        data, 90 + ROW * (depth + 1), annotations=labels, margin={"l": 24, "r": 24, "t": 56, "b": 8},
        shapes=[_rail(place) for place in range(depth + 1)],
        xaxis={"visible": False, "range": [-0.04, 1.04], "fixedrange": True},
        yaxis={"visible": False, "range": [-0.4, depth + 0.45], "fixedrange": True},
    )  # fmt: skip


def response_curves(figure: Figure) -> Specification:
    """A small plot for each knob, with its values on the x axis."""
    points, knobs = figure.table("points"), figure.table("knobs")
    drawn = [str(knob) for knob in knobs.column("knob")][:MOST_CURVES]
    data: list[Trace] = []
    layout: dict[str, Any] = {"annotations": []}
    height = CURVE * len(drawn)
    for place, knob in enumerate(drawn):
        number = "" if place == 0 else str(place + 1)
        top = 1 - place * CURVE / height
        data += _curve(points, knob, str(knobs.column("best")[place]), number)
        layout[f"xaxis{number}"] = axis("", type="category", anchor=f"y{number}", domain=[0, 1])
        inside = [top - (CURVE - CURVE_FOOT) / height, top - CURVE_HEAD / height]
        layout[f"yaxis{number}"] = axis("samples/s", domain=inside, anchor=f"x{number}")
        layout["annotations"].append(
            {
                "text": f"<b>{escaped(knob.replace('_', ' '))}</b>", "x": 0, "xref": "paper", "xanchor": "left",
                "y": top - CURVE_HEAD / height, "yref": "paper", "yanchor": "bottom", "yshift": 4, "showarrow": False,
                "font": {"size": 13, "color": color("text")},
            }
        )  # fmt: skip
    return specification(_each_named_once(data), 64 + height, margin={"l": 56, "r": 16, "t": 56, "b": 8}, **layout)


def _each_named_once(data: list[Trace]) -> list[Trace]:
    """Show each name once in the legend, for the first of the small plots that has it."""
    seen: set[str] = set()
    found = []
    for trace in data:
        name = trace.get("name", "")
        found.append(trace | {"legendgroup": name, "showlegend": bool(name) and name not in seen})
        seen.add(name)
    return found


def _picked(values: list[float | None], rows: list[int]) -> list[float | None]:
    return [values[row] for row in rows]


def _staircase(table: Table, along: str, along_scale: float, scale: float, more: dict[str, Any]) -> Trace:
    """The best so far as steps: only the points where it changes, and the last one."""
    best = table.column("best")
    rows = [row for row in range(len(best)) if row in (0, len(best) - 1) or best[row] != best[row - 1]]
    return {
        "type": "scatter", "mode": "lines", "x": _picked(scaled(table.column(along), along_scale), rows),
        "y": _picked(scaled(best, scale), rows), "hoverinfo": "x+y",
        "line": {"color": color("best"), "width": 3, "shape": "hv"}, **more,
    }  # fmt: skip


def _strands(
    trials: Table, values: list[Any], places: list[dict[Any, float]], rows: list[int], ends: tuple[float, float], step: int
) -> Trace:
    """The lines of several trials as one trace with gaps between them."""
    low, high = ends
    across: list[float | None] = []
    down: list[float | None] = []
    for row in rows:
        # Lines of equal values would hide each other, so each gets a small offset.
        beside = ((row * 0.618) % 1 - 0.5) * 0.03
        rate = float(trials.column("samples_per_second")[row] or 0.0)
        across += [
            *(float(f"{places[knob][own[row]] + beside:.4f}") for knob, own in enumerate(values)),
            (rate - low) / (high - low) if high > low else 0.5, None,
        ]  # fmt: skip
        down += [*range(len(values), -1, -1), None]
    edges = [low + (high - low) * share / len(STEPS) for share in (step, step + 1)]
    unit = " samples/s" * (step == len(STEPS) - 1)
    return {
        "type": "scatter", "mode": "lines", "x": across, "y": down, "hoverinfo": "skip",
        "name": f"{edges[0]:.3g} to {edges[1]:.3g}{unit}", "connectgaps": False,
        "line": {"color": color(STEPS[step]), "width": 1 + 0.4 * step}, "opacity": 0.55 + 0.1 * step,
    }  # fmt: skip


def _step(rate: float, low: float, high: float) -> int:
    return min(int((rate - low) / (high - low) * len(STEPS)), len(STEPS) - 1) if high > low else len(STEPS) - 1


def _rail(place: int) -> dict[str, Any]:
    return {
        "type": "line", "x0": 0, "x1": 1, "y0": place, "y1": place, "layer": "below",
        "line": {"color": color("line-strong"), "width": 1},
    }  # fmt: skip


def _name(text: str, place: int) -> dict[str, Any]:
    return {
        "text": f"<b>{escaped(text)}</b>", "x": -0.02, "y": place, "xanchor": "left", "yanchor": "bottom", "yshift": 5,
        "showarrow": False, "font": {"size": 12, "color": color("text")}, "bgcolor": color("surface"), "borderpad": 1,
    }  # fmt: skip


def _tick(text: str, at: float, place: int) -> dict[str, Any]:
    return {
        "text": escaped(text), "x": at, "y": place, "yanchor": "top", "yshift": -3, "showarrow": False,
        "font": {"size": 11, "color": color("text-soft")}, "bgcolor": color("surface"), "borderpad": 1,
    }  # fmt: skip


def _in_order(knob: str, values: set[Any]) -> list[Any]:
    """Numbers by size, names in the order of the knob's choices, other values alphabetically."""
    if any(isinstance(value, str) for value in values):
        listed = [choice for choice in KNOBS[knob].choices if choice in values]
        return [*listed, *sorted(values - set(listed), key=str)]
    return sorted(values, key=float)


def _short(value: Any) -> str:
    """`500 M`: a compact form of large values."""
    if isinstance(value, bool | str) or abs(value) < 10_000:
        text = value_text(value)
        return text if len(text) <= 18 else f"{text[:17]}…"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}"
    return value_text(value)


_SOURCES = {
    "measured": ("circle", "ok", "measured"), "predicted": ("circle-open", "ok", "predicted"),
    "bound": ("triangle-down", "pruned", "ended early: at most"), "over_limit": ("x", "infeasible", "over the limit"),
    "does_not_fit": ("x-open", "infeasible", "should not fit (predicted)"),
}  # fmt: skip

_LOST = ("out_of_memory", "failed")
_JOINED = ("measured", "predicted", "over_limit", "does_not_fit")
"""Sources whose rates a line may join. A bound is not one: its rate is unknown."""


def _curve(points: Table, knob: str, best: str, number: str) -> list[Trace]:
    rates, values = points.column("samples_per_second"), points.column("value")
    # Values that a rule refuses appear only in the table: they have nothing to draw.
    own = [
        row
        for row, name in enumerate(points.column("knob"))
        if name == knob and (rates[row] is not None or points.column("source")[row] in _LOST)
    ]
    with_rate = [row for row in own if rates[row] is not None]
    found: list[Trace] = [
        {
            "type": "scatter", "mode": "lines", "x": [escaped(values[row]) for row in own],
            "y": [rates[row] if points.column("source")[row] in _JOINED else None for row in own],
            "line": {"color": color("line-strong"), "width": 1}, "hoverinfo": "skip", "connectgaps": True,
            "xaxis": f"x{number}", "yaxis": f"y{number}",
        }
    ]  # fmt: skip
    for source, (symbol, tone, label) in _SOURCES.items():
        same_source = [row for row in with_rate if points.column("source")[row] == source]
        if same_source:
            found.append(_markers(points, same_source, symbol, tone, label, number))
    least = min((float(rates[row] or 0.0) for row in with_rate), default=0.0)
    lost = [row for row in own if rates[row] is None and points.column("source")[row] in _LOST]
    if lost:
        look = look_of("INFEASIBLE")
        found.append(
            {
                "type": "scatter", "mode": "markers", "x": [escaped(values[row]) for row in lost], "y": [least] * len(lost),
                "name": "out of memory or failed", "hoverinfo": "text",
                "hovertext": texts(points, ("value", "source", "note"), lost),
                "marker": {"symbol": "x-thin", "size": 11, "line": {"width": 3, "color": color(look.color)}},
                "xaxis": f"x{number}", "yaxis": f"y{number}",
            }
        )  # fmt: skip
    won = [row for row in with_rate if str(values[row]) == best]
    found.append(
        {
            "type": "scatter", "mode": "markers", "x": [escaped(values[row]) for row in won], "y": [rates[row] for row in won],
            "name": "best",
            "marker": {"symbol": "star", "size": 15, "color": color("best"), "line": {"width": 1, "color": color("text")}},
            "hoverinfo": "text", "hovertext": texts(points, ("value", "samples_per_second", "trial"), won),
            "xaxis": f"x{number}", "yaxis": f"y{number}",
        }
    )  # fmt: skip
    return found


def _markers(points: Table, rows: list[int], symbol: str, tone: str, label: str, number: str) -> Trace:
    """Markers for the points of one source; a bound is drawn at its upper end, without an interval."""
    bound = label == _SOURCES["bound"][2]
    rates, lows, highs = (_numbers(points, name, rows) for name in ("samples_per_second", "low", "high"))
    middle = highs if bound else rates
    hints = texts(points, ("value", "source", "samples_per_second", "low", "high", "peak_bytes", "note"), rows)
    return {
        "type": "scatter", "mode": "markers", "x": [escaped(points.column("value")[row]) for row in rows], "y": middle,
        "name": label,
        "marker": {"symbol": symbol, "size": 9, "color": color(tone), "line": {"width": 2, "color": color(tone)}},
        "error_y": {
            "type": "data", "symmetric": False, "color": color(tone), "thickness": 1, "width": 4, "visible": not bound,
            "array": [high - at for high, at in zip(highs, middle, strict=True)],
            "arrayminus": [at - low for low, at in zip(lows, middle, strict=True)],
        },
        "hoverinfo": "text", "hovertext": hints, "xaxis": f"x{number}", "yaxis": f"y{number}",
    }  # fmt: skip


def _numbers(points: Table, name: str, rows: list[int]) -> list[float]:
    values = points.column(name)
    return [float(values[row] or 0.0) for row in rows]
