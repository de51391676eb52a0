"""The common style of all plots: background, axes, escaped text."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.explain.figures.figure import Unit, cell_text
from autotune.explain.figures.palette import DARK, LIGHT, PALE
from autotune.wire.figures import Cell, Figure, Mark, Table

Trace = dict[str, Any]
Specification = dict[str, Any]
"""`data` and `layout` of a plotly figure, as plain data."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MOST = 450
"""About how many trials are drawn: more would be indistinguishable and would make reports large."""
LONGEST = 160
"""Most characters of one value in a hover text; tables have the whole value."""
_MIB, _GIB = 2.0**20, 2.0**30


def escaped(text: object) -> str:
    """Escape text for plotly, which would interpret tags and entities."""
    return html.escape(str(text), quote=False)


def color(name: str) -> str:
    """A colour of the light palette; `in_dark` converts all colours of a plot at once."""
    return LIGHT[name]


def in_dark(value: Any) -> Any:
    """The same plot with the dark palette."""
    if isinstance(value, str):
        return _IN_DARK.get(value, value)
    if isinstance(value, Mapping):
        return {key: in_dark(item) for key, item in value.items()}
    return [in_dark(item) for item in value] if isinstance(value, list | tuple) else value


def specification(data: Sequence[Trace], height: int, **layout: Any) -> Specification:
    """A plot of this height in pixels; its width is that of its container."""
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


def text_color(tone: str) -> str:
    """The colour of text on this colour."""
    return color("on-pale" if tone in PALE else "on-strong")


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with a thin grid."""
    base = {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": color("text-soft")}},
        "gridcolor": color("line"), "linecolor": color("line-strong"), "zerolinecolor": color("line"), "zeroline": False,
        "tickfont": {"color": color("text-soft")}, "automargin": True, "fixedrange": True,
    }  # fmt: skip
    return base | more


def scale_of(values: Sequence[Cell], unit: str) -> tuple[float, str]:
    """A divisor that makes the largest value easy to read, and the resulting unit."""
    largest = max((abs(float(value)) for value in values if isinstance(value, int | float)), default=0.0)
    match unit:
        case Unit.BYTES:
            return (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB") if largest >= _MIB else (1024.0, "KiB")
        case Unit.SECONDS:
            return (3600.0, "h") if largest >= 7200 else (60.0, "min") if largest >= 600 else _short(largest)
        case Unit.SHARE:
            return 0.01, "%"
        case _:
            return 1.0, unit


def scaled(values: Sequence[Cell], scale: float) -> list[float | None]:
    """Values divided by `scale`, with six digits."""
    return [float(f"{float(value) / scale:.6g}") if isinstance(value, int | float) else None for value in values]


def texts(table: Table, names: Sequence[str], rows: Sequence[int]) -> list[str]:
    """Hover texts: a line for each of these columns that has a value."""
    columns = [column for name in names for column in table.columns if column.name == name]
    found = []
    for row in rows:
        cells = [(column, cell_text(column.values[row], column.unit)) for column in columns if column.values[row] is not None]
        lines = [f"{column.title} {text if len(text) <= LONGEST else f'{text[: LONGEST - 1]}…'}" for column, text in cells]
        found.append("<br>".join(map(escaped, lines)))
    return found


def thinned(table: Table, shown_where: Sequence[str] = (), keep: Sequence[str] = (), most: int = MOST) -> list[int]:
    """The rows that are drawn: those with a value in every column of `shown_where`. Of very many, every n-th, and those for
    which a column of `keep` is true."""
    needed = [table.column(name) for name in shown_where]
    rows = [row for row in range(len(table)) if all(values[row] is not None for values in needed)]
    if len(rows) <= most:
        return rows
    kept = {row for name in keep for row in rows if table.column(name)[row]}
    return sorted(kept | set(rows[:: -(-len(rows) // most)]))


def mark_line(mark: Mark, scale: float, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The line of a mark, and the label beside it."""
    tone = color("infeasible") if mark.name in ("limit", "capacity") else color("text")
    value, dash = mark.value / scale, "dot" if mark.name == "capacity" else "dash"
    along, across = ("x", "y") if mark.axis == "x" else ("y", "x")
    line = {
        "type": "line", f"{along}0": value, f"{along}1": value, f"{across}0": 0, f"{across}1": 1,
        f"{across}ref": f"{across} domain",
        "line": {"color": tone, "width": 1.5, "dash": dash},
    }  # fmt: skip
    name = {
        along: value, across: 1.0, f"{across}ref": f"{across} domain", "text": escaped(mark.title), "showarrow": False,
        "font": {"size": 11, "color": tone}, "bgcolor": color("surface"), "borderpad": 2,
        **({"xanchor": "right", "yanchor": "top"} if along == "x" else {"xanchor": "right", "yanchor": "bottom"}),
    }  # fmt: skip
    return line, name | more


def empty_plot(figure: Figure) -> Specification:
    """The plot of a figure without data: a text with the reason."""
    words = {
        "text": escaped(figure.summary), "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False,
        "font": {"size": 13, "color": color("text-soft")}, "width": 320,
    }  # fmt: skip
    return specification([], 160, annotations=[words], xaxis={"visible": False}, yaxis={"visible": False})


def _short(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "µs")


_IN_DARK = {LIGHT[name]: tone for name, tone in DARK.items()}
