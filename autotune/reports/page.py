"""Writes a job as one HTML file that needs nothing else: the figures' data, and the web page's program that draws them."""

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autotune.explain.figures import OF_TRIALS
from autotune.explain.figures.source import cell_text
from autotune.reports.report import Report
from autotune.text.explain_sections import SectionTable
from autotune.wire.figures import Column, Figure, Table
from autotune.wire.trials import Points
from search_spaces.plain import finite, to_plain

MOST_ROWS = 150
"""Most rows of a table that is shown without JavaScript."""
PROGRAM, CHARTS = "report.mjs", "vendor/echarts.mjs"
"""The module of the page that draws the figures of a file, and the chart library, which only figures of trials need."""
_EXPORTS = re.compile(r"\bexport ?\{([^}]*)\};")


def page_of(report: Report) -> str:
    """The report as a file. The template escapes user text."""
    return _document(
        "report.html",
        report.figures,
        report.points,
        report=report,
        title=f"{report.title}: {report.job}",
        is_table=lambda item: isinstance(item, SectionTable),
    )


def figures_page(title: str, figures: Sequence[Figure], points: Points | None) -> str:
    """Only these figures as a file."""
    return _document("document.html", figures, points, title=title)


def _document(template: str, figures: Sequence[Figure], points: Points | None, **content: Any) -> str:
    """The template with the figures' data and their program."""
    shown = {figure.name: figure for figure in figures if figure.name not in OF_TRIALS}
    style, program = _style(), _program(has_charts=points is not None)
    return (
        _environment()
        .get_template(template)
        .render(
            **content,
            figures=figures,
            rows_of=_rows,
            coded=coded,
            is_text=_is_text,
            most_rows=MOST_ROWS,
            style=Markup(style),
            program=Markup(program),
            # The file's Content-Security-Policy, which names its style sheet and its script by their hashes.
            policy="default-src 'none'; base-uri 'none'; form-action 'none'; "
            f"style-src {_hash(style)}; script-src {_hash(program)}",
            data=Markup(script_json({"points": to_plain(points), "figures": to_plain(shown)})),
        )
    )


@cache
def _program(has_charts: bool) -> str:
    """The page's module `PROGRAM` with all that it imports, as one script: each module is a function, called once."""
    linked: dict[str, str] = {}

    def link(path: str) -> None:
        if path in linked or (path == CHARTS and not has_charts):
            return
        text = _page_file(path)
        for name in re.findall(r'(?:^import \{[^}]*\} from |\bimport\()"([^"]+)"', text, re.MULTILINE):
            link(_resolved(path, name))
        linked[path] = _as_function(path, text)

    link(PROGRAM)
    return "\n".join(["const modules = {};", *linked.values()])


def _as_function(path: str, text: str) -> str:
    """A call of a function that runs the module and returns its exports. Imports and exports are by name."""
    text = re.sub(
        r'^import \{([^}]*)\} from "([^"]+)";',
        lambda m: f'const {{{m[1].replace(" as ", ": ")}}} = modules["{_resolved(path, m[2])}"];',
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r'\bimport\("([^"]+)"\)', lambda m: f'Promise.resolve(modules["{_resolved(path, m[1])}"])', text)
    names = re.findall(r"^export (?:async function|function|const|class) (\w+)", text, re.MULTILINE)
    # A vendored module lists its exports at its end: `export{a as render};`
    names += [": ".join(reversed(pair.split(" as "))) for pairs in _EXPORTS.findall(text) for pair in pairs.split(",")]
    unmarked = re.sub(r"^export (?=async |function |const |class )", "", text, flags=re.MULTILINE)
    body = _EXPORTS.sub("", unmarked)
    return f'modules["{path}"] = (() => {{\n"use strict";\n{body}\nreturn {{ {", ".join(names)} }};\n}})();'


def _resolved(path: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), name))


@cache
def _style() -> str:
    return "\n".join(
        [
            *map(_page_file, ("style.css", "style/parts.css", "style/tables.css", "style/charts.css")),
            files("autotune.reports").joinpath("templates/report.css").read_text("utf-8"),
        ]
    )


def _page_file(path: str) -> str:
    """A file of the web page, read as data: the client, which has no page, writes reports by a service."""
    return files("api").joinpath("page", path).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that is safe in a script element: it cannot end the element or begin a comment."""
    text = json.dumps(finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=datetime.isoformat)
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


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
