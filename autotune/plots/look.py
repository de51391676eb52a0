"""What all plots have in common: ground, axes, text that is text."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.explain.figures.figure import Cell, Figure, Mark, Table, Unit
from autotune.explain.figures.palette import DARK, LIGHT, PALE
from autotune.explain.figures.units import cell_text

Trace = dict[str, Any]
Specification = dict[str, Any]
"""`data` and `layout` as plotly takes them, in plain data."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MOST = 450
"""Trials that are drawn, about: more are no longer told apart, and a report would not stay small."""
LONGEST = 160
"""Characters of one thing where one points; tables have all of it."""
_MIB, _GIB = 2.0**20, 2.0**30


def shown(text: object) -> str:
    """Text as plotly shows it: what looks like a tag or an entity is text, too."""
    return html.escape(str(text), quote=False)


def color(name: str) -> str:
    """A colour of the palette, as it is on a light ground: `in_dark` changes all of a plot's at once."""
    return LIGHT[name]


def in_dark(value: Any) -> Any:
    """The same plot on a dark ground."""
    if isinstance(value, str):
        return _IN_DARK.get(value, value)
    if isinstance(value, Mapping):
        return {key: in_dark(item) for key, item in value.items()}
    return [in_dark(item) for item in value] if isinstance(value, list | tuple) else value


def specification(data: Sequence[Trace], height: int, **layout: Any) -> Specification:
    """A plot of this height; its width is what there is."""
    base = {
        "height": height,
        "autosize": True,
        "paper_bgcolor": color("surface"),
        "plot_bgcolor": color("surface"),
        "font": {"family": FONT, "size": 12, "color": color("text")},
        "margin": {"l": 56, "r": 16, "t": 16, "b": 48},
        "hoverlabel": {
            "bgcolor": color("surface"), "bordercolor": color("line-strong"), "font": {"color": color("text"), "size": 12},
            "align": "left",
        },
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        "dragmode": False,
        "hovermode": "closest",
    }  # fmt: skip
    return {"data": list(data), "layout": base | layout}


def ink(tone: str) -> str:
    """The colour of text that stands on this one."""
    return color("on-pale" if tone in PALE else "on-strong")


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with a thin grid."""
    base = {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": color("text-soft")}},
        "gridcolor": color("line"), "linecolor": color("line-strong"), "zerolinecolor": color("line"), "zeroline": False,
        "tickfont": {"color": color("text-soft")}, "automargin": True, "fixedrange": True,
    }  # fmt: skip
    return base | more


def scale_of(values: Sequence[Cell], unit: Unit) -> tuple[float, str]:
    """What to divide figures by so that the largest is easy to read, and the unit that they have then."""
    largest = max((abs(float(value)) for value in values if isinstance(value, int | float)), default=0.0)
    match unit:
        case Unit.BYTES:
            return (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB") if largest >= _MIB else (1024.0, "KiB")
        case Unit.SECONDS:
            return (3600.0, "h") if largest >= 7200 else (60.0, "min") if largest >= 600 else _short(largest)
        case Unit.SHARE:
            return 0.01, "%"
        case _:
            return 1.0, unit.value


def scaled(values: Sequence[Cell], scale: float) -> list[float | None]:
    """Figures in the unit of `scale_of`, six digits."""
    return [float(f"{float(value) / scale:.6g}") if isinstance(value, int | float) else None for value in values]


def texts(table: Table, names: Sequence[str], rows: Sequence[int]) -> list[str]:
    """What is shown where one points: a line for each of these columns that has something to say."""
    columns = [column for name in names for column in table.columns if column.name == name]
    found = []
    for row in rows:
        told = [(column, cell_text(column.values[row], column.unit)) for column in columns if column.values[row] is not None]
        lines = [f"{column.title} {text if len(text) <= LONGEST else f'{text[: LONGEST - 1]}…'}" for column, text in told]
        found.append("<br>".join(map(shown, lines)))
    return found


def thinned(table: Table, shown_where: Sequence[str] = (), keep: Sequence[str] = (), most: int = MOST) -> list[int]:
    """The rows that are drawn: those with a figure in every column `shown_where`; of very many every n-th, and those for which
    one of the columns `keep` is true."""
    needed = [table.column(name) for name in shown_where]
    rows = [row for row in range(len(table)) if all(values[row] is not None for values in needed)]
    if len(rows) <= most:
        return rows
    kept = {row for name in keep for row in rows if table.column(name)[row]}
    return sorted(kept | set(rows[:: -(-len(rows) // most)]))


def crossing(mark: Mark, scale: float, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The line of a mark, and its name beside it."""
    tone = color("infeasible") if mark.name in ("limit", "capacity") else color("text")
    value, dash = mark.value / scale, "dot" if mark.name == "capacity" else "dash"
    along, across = ("x", "y") if mark.axis == "x" else ("y", "x")
    line = {
        "type": "line", f"{along}0": value, f"{along}1": value, f"{across}0": 0, f"{across}1": 1,
        f"{across}ref": f"{across} domain",
        "line": {"color": tone, "width": 1.5, "dash": dash},
    }  # fmt: skip
    name = {
        along: value, across: 1.0, f"{across}ref": f"{across} domain", "text": shown(mark.title), "showarrow": False,
        "font": {"size": 11, "color": tone}, "bgcolor": color("surface"), "borderpad": 2,
        **({"xanchor": "right", "yanchor": "top"} if along == "x" else {"xanchor": "right", "yanchor": "bottom"}),
    }  # fmt: skip
    return line, name | more


def nothing(figure: Figure) -> Specification:
    """In place of a plot that there is nothing for: why."""
    words = {
        "text": shown(figure.summary), "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False,
        "font": {"size": 13, "color": color("text-soft")}, "width": 320,
    }  # fmt: skip
    return specification([], 160, annotations=[words], xaxis={"visible": False}, yaxis={"visible": False})


def _short(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "µs")


_IN_DARK = {LIGHT[name]: tone for name, tone in DARK.items()}
