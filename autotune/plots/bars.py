"""Bar plots: shares, parts of a whole, time spans."""

import heapq
from collections.abc import Sequence
from typing import Any

from autotune.explain.figures import memory_breakdown as memory
from autotune.explain.figures import time_breakdown as time
from autotune.explain.figures.figure import Unit, cell_text
from autotune.explain.figures.palette import SERIES, look_of
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
    text_color,
    texts,
    thinned,
)
from autotune.wire.figures import Figure, Table

MOST_KNOBS = 15
LONGEST_NODE = 24
"""Most characters of a node's name beside its lane."""
MOST_LABELS = 400
"""Most bars for which each bar has a label."""
NAMES_SHARE, PANEL_GAP = 0.36, 0.03
"""Shares of the width of the module tree: the names, and the gap between panels."""
_PANELS = (("seconds", "time, %", "series-1"), ("flops", "FLOPs, %", "series-2"), ("memory_bytes", "states, %", "series-3"))
_KINDS = {
    "forward": ("forward", "series-1"), "backward": ("backward", "series-3"),
    "input_gradient": ("gradient of inputs", "series-3"),
    "weight_gradient": ("gradient of weights", "series-2"),
}  # fmt: skip


def knob_importance(figure: Figure) -> Specification:
    """A bar for each knob with its interval, the most important at the top."""
    knobs = figure.table("knobs")
    rows = range(min(len(knobs), MOST_KNOBS))
    names = [escaped(str(knobs.column("knob")[row]).replace("_", " ")) for row in rows]
    middle, low, high = (scaled(knobs.column(name), 0.01) for name in ("importance", "low", "high"))
    bars = {
        "type": "bar", "orientation": "h", "y": names, "x": [middle[row] for row in rows], "marker": {"color": color("ok")},
        "hoverinfo": "text", "hovertext": texts(knobs, [column.name for column in knobs.columns], list(rows)),
        "showlegend": False,
        "error_x": {
            "type": "data", "symmetric": False, "color": color("text"), "thickness": 1.5, "width": 5,
            "array": [(high[row] or 0) - (middle[row] or 0) for row in rows],
            "arrayminus": [(middle[row] or 0) - (low[row] or 0) for row in rows],
        },
    }  # fmt: skip
    return specification(
        [bars], 90 + 34 * len(names), xaxis=axis("share of the variance, %", rangemode="tozero"),
        yaxis=axis("", autorange="reversed", type="category"), bargap=0.35,
    )  # fmt: skip


def time_breakdown(figure: Figure) -> Specification:
    """A stacked bar for each configuration: the parts of its step."""
    parts = figure.table("parts")
    titles = [(name, time.TITLES[name]) for name in time.ORDER]
    tones = [*SERIES[: len(titles) - 1], "low-1"]
    return _stacked(figure, parts, "part", "seconds", titles, dict(zip(time.ORDER, tones, strict=True)))


def memory_breakdown(figure: Figure) -> Specification:
    """A stacked bar for each configuration: the memory of the fullest rank, with the limit."""
    tags = figure.table("tags")
    names = [*memory.ORDER, *sorted({str(tag) for tag in tags.column("tag")} - set(memory.ORDER))]
    tones = {name: SERIES[place % len(SERIES)] for place, name in enumerate(names)}
    return _stacked(figure, tags, "tag", "bytes", [(name, name.replace("_", " ")) for name in names], tones)


def timeline(figure: Figure) -> Specification:
    """Lanes for each node, as many as it ran trials at the same time."""
    attempts = figure.table("attempts")
    rows = thinned(attempts, ("started",))
    last = max((float(end) for end in attempts.column("finished") if isinstance(end, int | float)), default=1.0)
    scale, unit = scale_of([last], Unit.SECONDS)
    lanes = _lanes(attempts, rows, last)
    groups: dict[object, list[int]] = {}
    for row in rows:
        groups.setdefault(attempts.column("outcome")[row], []).append(row)
    data = []
    for outcome, own in sorted(groups.items(), key=lambda item: -len(item[1])):
        look = look_of(outcome)
        starts = [float(attempts.column("started")[row] or 0.0) for row in own]
        ends = [attempts.column("finished")[row] for row in own]
        data.append(
            {
                "type": "bar", "orientation": "h", "name": look.label, "y": [lanes[row] for row in own],
                "base": [start / scale for start in starts], "hoverinfo": "text",
                "x": [((last if end is None else float(end)) - start) / scale for start, end in zip(starts, ends, strict=True)],
                "hovertext": texts(attempts, [column.name for column in attempts.columns], own),
                "marker": {"color": color(look.color), "line": {"color": color("surface"), "width": 1}},
                "text": [str(attempts.column("trial")[row]) if len(rows) <= MOST_LABELS else "" for row in own],
                "textposition": "inside", "insidetextanchor": "middle", "textfont": {"color": text_color(look.color)},
            }
        )  # fmt: skip
    order = sorted(set(lanes.values()), key=_lane_order, reverse=True)
    return specification(
        data, 130 + 36 * len(order), barmode="overlay", bargap=0.2, xaxis=axis(f"since the first trial started, {unit}"),
        yaxis=axis("", type="category", categoryorder="array", categoryarray=order), uniformtext={"minsize": 8, "mode": "hide"},
    )  # fmt: skip


def pipeline_schedule(figure: Figure) -> Specification:
    """A row for each rank; each bar is a micro-batch on a stage."""
    actions = figure.table("actions")
    rows = range(len(actions))
    scale, unit = scale_of(actions.column("end"), Unit.SECONDS)
    stages = len(set(actions.column("stage")))
    ranks = len(set(actions.column("rank")))
    data = []
    for kind, (label, tone) in _KINDS.items():
        own = [row for row in rows if actions.column("kind")[row] == kind]
        if not own:
            continue
        starts, ends = ([float(actions.column(name)[row] or 0.0) for row in own] for name in ("start", "end"))
        data.append(
            {
                "type": "bar", "orientation": "h", "name": label, "y": [f"rank {actions.column('rank')[row]}" for row in own],
                "base": [float(f"{start / scale:.6g}") for start in starts],
                "x": [float(f"{(end - start) / scale:.6g}") for start, end in zip(starts, ends, strict=True)],
                "hoverinfo": "text", "hovertext": texts(actions, [column.name for column in actions.columns], own),
                # The stages of a rank differ in opacity.
                "marker": {
                    "color": color(tone), "line": {"color": color("surface"), "width": 1},
                    "opacity": [1.0 - 0.5 * (int(actions.column("stage")[row] or 0) // ranks) / max(stages // ranks,
                        1) for row in own],
                },
                "text": [str(actions.column("micro_batch")[row]) if len(rows) <= MOST_LABELS else "" for row in own],
                "textposition": "inside", "insidetextanchor": "middle", "textfont": {"color": text_color(tone)},
            }
        )  # fmt: skip
    names = [f"rank {rank}" for rank in sorted(set(actions.column("rank")), key=lambda rank: int(rank or 0))]
    return specification(
        data, 130 + 44 * ranks, barmode="overlay", bargap=0.15, xaxis=axis(f"since the step began, {unit}"),
        yaxis=axis("", type="category", categoryorder="array", categoryarray=names[::-1]),
        uniformtext={"minsize": 8, "mode": "hide"},
    )  # fmt: skip


def module_tree(figure: Figure) -> Specification:
    """A row for each module, indented, with its shares of time, FLOPs and model-state memory side by side."""
    modules = figure.table("modules")
    rows = list(range(len(modules)))
    names_shown = [column.name for column in modules.columns if column.name not in ("label", "kind", "depth")]
    hints = texts(modules, names_shown, rows)
    data: list[Trace] = []
    layout: dict[str, Any] = {}
    for place, (name, title, tone) in enumerate(_PANELS):
        number, left = "" if place == 0 else str(place + 1), NAMES_SHARE + place * (1 - NAMES_SHARE + PANEL_GAP) / len(_PANELS)
        values = [float(value or 0.0) for value in modules.column(name)]
        shares = [float(f"{100 * value / (values[0] or 1.0):.4g}") for value in values]
        data.append(
            {
                "type": "bar", "orientation": "h", "y": rows, "x": shares, "xaxis": f"x{number}", "hoverinfo": "text",
                "hovertext": hints, "marker": {"color": color(tone)}, "showlegend": False,
            }
        )  # fmt: skip
        right = left + (1 - NAMES_SHARE + PANEL_GAP) / len(_PANELS) - PANEL_GAP
        layout[f"xaxis{number}"] = axis(title, domain=[left, right], range=[0, 103], tickvals=[0, 50])
    names = [
        {
            "text": escaped(modules.column("label")[row]), "x": 0, "xref": "paper", "xanchor": "left", "y": row,
            "yanchor": "middle",
            "xshift": 10 * int(modules.column("depth")[row] or 0), "showarrow": False,
            "font": {"size": 12, "color": color("text")},
        }
        for row in rows
    ]  # fmt: skip
    return specification(
        data, 80 + 24 * len(rows), bargap=0.3, annotations=names, margin={"l": 4, "r": 12, "t": 8, "b": 48}, **layout,
        yaxis=axis("", autorange="reversed", showgrid=False, showticklabels=False),
    )  # fmt: skip


def _stacked(
    figure: Figure, table: Table, part: str, size: str, titles: Sequence[tuple[str, str]], tones: dict[str, str]
) -> Specification:
    unit_of = next(column.unit for column in table.columns if column.name == size)
    wholes: dict[str, float] = {}
    rows = range(len(table))
    bars = [_bar(table, row) for row in rows]
    for row in rows:
        wholes[bars[row]] = wholes.get(bars[row], 0.0) + float(table.column(size)[row] or 0.0)
    scale, unit = scale_of(list(wholes.values()), unit_of)
    data = []
    for name, title in titles:
        own = [row for row in rows if table.column(part)[row] == name]
        if not own:
            continue
        values = [float(table.column(size)[row] or 0.0) for row in own]
        shares = [value / wholes[bars[row]] for row, value in zip(own, values, strict=True)]
        data.append(
            {
                "type": "bar", "orientation": "h", "name": escaped(title), "y": [bars[row] for row in own],
                "x": [float(f"{value / scale:.6g}") for value in values], "marker": {"color": color(tones[name])},
                "hoverinfo": "text",
                "hovertext": [
                    f"{escaped(title)}<br>{cell_text(value, unit_of)}, {share:.1%}" for value,
                    share in zip(values, shares, strict=True)
                ],
                "text": [f"{share:.0%}" if share >= 0.08 else "" for share in shares], "textposition": "inside",
                "insidetextanchor": "middle", "textangle": 0, "textfont": {"color": text_color(tones[name]), "size": 12},
            }
        )  # fmt: skip
    lines = [mark_line(mark, scale) for mark in figure.marks]
    most = max([*wholes.values(), *(mark.value for mark in figure.marks)])
    names = list(dict.fromkeys(bars))
    return specification(
        data, 190 + 60 * len(names), barmode="stack", bargap=0.3, shapes=[line for line, _ in lines],
        annotations=[name | {"y": 1.0, "yanchor": "bottom", "yshift": 16 * place} for place, (_, name) in enumerate(lines)],
        xaxis=axis(f"{figure.x.title if figure.x else ''}, {unit}", range=[0, most * 1.05 / scale]),
        yaxis=axis("", autorange="reversed", type="category"), margin={"l": 56, "r": 16, "t": 12 + 18 * len(lines), "b": 90},
        legend={
            "orientation": "h", "xref": "container", "x": 0, "xanchor": "left", "yref": "container", "y": 0,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
    )  # fmt: skip


def _bar(table: Table, row: int) -> str:
    name = str(table.column("configuration")[row]).replace(", ", ",<br>")
    return f"{name}<br>trial {table.column('trial')[row]}"


def _lanes(attempts: Table, rows: Sequence[int], last: float) -> dict[int, str]:
    """Row -> its lane: the first lane of its node that is free when the trial starts."""
    free: dict[str, list[tuple[float, int]]] = {}
    found: dict[int, str] = {}
    count: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: float(attempts.column("started")[row] or 0.0)):
        node, start = str(attempts.column("node")[row]), float(attempts.column("started")[row] or 0.0)
        end = attempts.column("finished")[row]
        waiting = free.setdefault(node, [])
        if waiting and waiting[0][0] <= start:
            lane = heapq.heappop(waiting)[1]
        else:
            lane = count[node] = count.get(node, 0) + 1
        heapq.heappush(waiting, (last if end is None else float(end), lane))
        # Node names usually differ at the end, so keep the end.
        short = node if len(node) <= LONGEST_NODE else f"…{node[1 - LONGEST_NODE :]}"
        found[row] = escaped(short if lane == 1 else f"{short} · {lane}")
    return found


def _lane_order(lane: str) -> tuple[str, int]:
    node, _, number = lane.partition(" · ")
    return node, int(number) if number.isdigit() else 0
