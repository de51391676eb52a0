"""Writes a report as Markdown: tables, with character bars for shares."""

import re
from collections.abc import Sequence

from autotune.explain.figures.source import FigureUnit, cell_text
from autotune.reports.report import Pairs, Report
from autotune.text.explain_sections import Section, SectionTable
from autotune.text.prediction_table import bar_text
from autotune.wire.figures import Figure, Table


def markdown_of(report: Report) -> str:
    """The whole report."""
    parts = [f"# {escaped(report.title)}", f"Job {code(report.job)}. {escaped(report.headline)}", pairs(report.facts)]
    if report.assumed:
        parts += ["## Assumed, because it was not stated", "\n".join(f"- {escaped(text)}" for text in report.assumed)]
    if report.results:
        parts += ["## The best", pairs(report.results)]
    if report.knobs:
        rows = [(knob.name, knob.best, knob.baseline, knob.default, knob.description) for knob in report.knobs]
        parts.append(table(("knob", "best", "baseline", "default", ""), rows, numbers=()))
    for figure in report.figures:
        parts += _figure(figure)
    for section in report.sections:
        parts += _section(section)
    if report.notes:
        parts.append("\n".join(f"- {escaped(note)}" for note in report.notes))
    parts += ["## Where it comes from", pairs(report.environment), "## How to measure it again", block(report.commands)]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Text without active markup and without line breaks."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Inline code; the fence is longer than any run of backticks in it."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}{text}{fence}"


def block(lines: Sequence[str]) -> str:
    """A code block."""
    text = "\n".join(lines)
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}\n{text}\n{fence}"


def pairs(name_values: Pairs) -> str:
    """A list of names and values."""
    return "\n".join(f"- {escaped(name)}: {escaped(value)}" for name, value in name_values)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """A table; the columns `numbers` are right-aligned."""
    rule = ["---:" if index in numbers else "---" for index in range(len(header))]
    lines = [[escaped(cell) for cell in line] for line in (header, *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _figure(figure: Figure) -> list[str]:
    parts = [f"## {escaped(figure.title)}", escaped(figure.summary)]
    parts += [escaped(f"{mark.title}.") for mark in figure.marks]
    for figure_table in figure.tables:
        parts += _table_parts(figure_table)
    return [*parts, *(f"*{escaped(note)}*" for note in figure.notes)]


def _table_parts(figure_table: Table) -> list[str]:
    """Caption, table and, if rows are left out, a note. The first column of shares is drawn as bars beside it too."""
    shares = next((column for column in figure_table.columns if column.unit == FigureUnit.SHARE), None)
    drawn = [
        (column, index)
        for index, column in enumerate(figure_table.columns)
        if any(value is not None for value in column.values)
    ]
    rows = []
    # Most rows of a table; the HTML report has more.
    most_rows = 50
    for row in range(min(len(figure_table), most_rows)):
        cells = [cell_text(column.values[row], column.unit) for column, _ in drawn]
        share = shares.values[row] if shares is not None else None
        rows.append([*cells, bar_text(float(share))] if isinstance(share, int | float) else cells)
    header = [column.title for column, _ in drawn] + ([""] if shares is not None else [])
    rows = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    numbers = [index for index, (column, _) in enumerate(drawn) if not any(isinstance(value, str) for value in column.values)]
    parts = [f"{escaped(figure_table.title[:1].upper() + figure_table.title[1:])}:", table(header, rows, numbers)]
    if len(figure_table) > most_rows:
        parts.append(f"*The first {most_rows} of {len(figure_table):,} rows.*")
    return parts


def _section(section: Section) -> list[str]:
    parts = [f"## {escaped(section.title)}, in detail"]
    for item in section.content:
        if isinstance(item, SectionTable):
            numbers = [index for index in range(len(item.header)) if index not in item.left]
            parts.append(table(item.header, item.rows, numbers))
        else:
            parts.append(escaped(item))
    return parts
