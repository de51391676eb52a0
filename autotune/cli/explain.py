"""`autotune explain`: why a job's best configuration is the best."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.cli.finite import finite
from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.explain.explanation.findings import Explanation
from autotune.ops.output import require_writable, write_whole
from autotune.text.console import Console
from autotune.text.explain_markdown import markdown_of
from autotune.text.explain_sections import Rows, head_lines, sections_of
from search_spaces.plain import to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """What the command line gave."""

    job: str | None
    markdown: Path | None
    """Where the report is written as Markdown, too."""
    url: str | None
    database: str | None
    json: bool


def explain_command(options: ExplainOptions) -> Status:
    """Read, explain, print."""
    if options.markdown is not None:
        require_writable(options.markdown)
    with open_backend(options.url, options.database) as desk:
        told = desk.explain(options.job)
    if options.markdown is not None:
        write_whole(options.markdown, markdown_of(told))
    if options.json:
        sys.stdout.write(json.dumps(document_of(told), indent=2, allow_nan=False) + "\n")
    elif options.markdown is None:
        print_explanation(told, Console())
    return Status.OK


def document_of(told: Explanation) -> dict[str, Any]:
    """The one document of `--json`: the fields of `Explanation`; what is not finite is null."""
    document: dict[str, Any] = finite(to_plain(told))
    return document


def print_explanation(told: Explanation, console: Console) -> None:
    """As people read it."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False)

    for line in head_lines(told):
        say(line)
    for section in sections_of(told):
        say(f"\n{section.title}", "bold")
        for item in section.content:
            if isinstance(item, Rows):
                console.print(_table(item), highlight=False)
            else:
                say(item)
    for note in told.notes:
        say(f"\nnote: {note}", "yellow")


def _table(rows: Rows) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, name in enumerate(rows.header):
        first, left = column == 0, column in rows.left
        last = left and not first and column == len(rows.header) - 1
        table.add_column(f"  {name}" if first else name, justify="left" if left else "right", no_wrap=not last, overflow="fold")
    for first_cell, *rest in rows.rows:
        table.add_row(f"  {first_cell}", *rest)
    return table
