"""Writes a report as one self-contained HTML file: plots, tables and the scripts that draw them."""

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autotune.explain.figures.figure import cell_text
from autotune.explain.figures.palette import DARK, LIGHT
from autotune.plots.drawing import drawn, thinning
from autotune.reports.report import Report
from autotune.text.explain_sections import Rows
from autotune.wire.figures import Column, Table

POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data: blob:"
"""The file's Content-Security-Policy, apart from its two scripts; plotly sets inline styles."""
MOST_ROWS = 150
"""Most rows of a table, so that a report of very many trials stays small enough to send."""


def page_of(report: Report) -> str:
    """The whole file. The template escapes user text; the policy allows the two scripts by their hashes."""
    plotly, own = plotly_source(), _text("report.js")
    plots = {figure.name: drawn(figure) for figure in report.figures if figure}
    tones = {LIGHT[name]: tone for name, tone in DARK.items()}
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            rows_of=_rows,
            coded=coded,
            thinning=thinning,
            is_text=_is_text,
            is_table=lambda item: isinstance(item, Rows),
            most_rows=MOST_ROWS,
            light=LIGHT,
            dark=DARK,
            style=Markup(_text("report.css")),
            plotly=Markup(plotly),
            program=Markup(own),
            policy=f"{POLICY}; script-src {_hash(plotly)} {_hash(own)}",
            data=Markup(script_json({"plots": plots, "dark": tones})),
        )
    )


@cache
def plotly_source() -> str:
    """plotly.js, read from plotly's package without importing plotly, which would take a second."""
    return files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that is safe in a script element: it cannot end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def coded(text: str) -> Markup:
    """Text between backticks becomes code; the rest is escaped."""
    parts = text.split("`")
    pairs = zip(parts[::2], [*parts[1::2], ""], strict=False)
    return Markup("").join(Markup("{}<code>{}</code>" if code else "{}{}").format(plain, code) for plain, code in pairs)


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("autotune.reports", "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def _rows(table: Table) -> list[list[tuple[str, bool]]]:
    """Cells as text, with whether each is a number; at most `MOST_ROWS` rows."""
    columns = [(column, _is_text(column)) for column in table.columns]
    return [
        [(cell_text(column.values[row], column.unit), not text) for column, text in columns]
        for row in range(min(len(table), MOST_ROWS))
    ]


def _is_text(column: Column) -> bool:
    return any(isinstance(value, str) for value in column.values)


def _text(name: str) -> str:
    return files("autotune.reports").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
