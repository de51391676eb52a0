"""`autotune explain`: explain why a job's best configuration is the best."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.cli.documents import write_document
from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.explain.explanation.findings import Explanation
from autotune.ops.output import require_writable, write_whole
from autotune.text.console import Console
from autotune.text.explain_sections import SectionTable, head_lines, markdown_of, sections_of
from search_spaces.plain import finite, to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Parsed options of the command."""

    job: str | None
    markdown: Path | None
    """Path for the report as Markdown."""
    url: str | None
    database: str | None
    json: bool


def explain_command(options: ExplainOptions) -> Status:
    """Read the job, explain it and print the explanation."""
    if options.markdown is not None:
        require_writable(options.markdown)
    with open_backend(options.url, options.database) as backend:
        explanation = backend.explain(options.job)
    if options.markdown is not None:
        write_whole(options.markdown, markdown_of(explanation))
    if options.json:
        write_document(document_of(explanation))
    elif options.markdown is None:
        print_explanation(explanation, Console())
    return Status.OK


def document_of(explanation: Explanation) -> dict[str, Any]:
    """The document of `--json`: the fields of `Explanation`; non-finite numbers are null."""
    document: dict[str, Any] = finite(to_plain(explanation))
    return document


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print the explanation as text."""

    def print_line(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False)

    for line in head_lines(explanation):
        print_line(line)
    for section in sections_of(explanation):
        print_line(f"\n{section.title}", "bold")
        for item in section.content:
            if isinstance(item, SectionTable):
                console.print(_table(item), highlight=False)
            else:
                print_line(item)
    for note in explanation.notes:
        print_line(f"\nnote: {note}", "yellow")


def _table(rows: SectionTable) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column, name in enumerate(rows.header):
        first, is_left_aligned = column == 0, column in rows.left
        last = is_left_aligned and not first and column == len(rows.header) - 1
        table.add_column(
            f"  {name}" if first else name, justify="left" if is_left_aligned else "right", no_wrap=not last, overflow="fold"
        )
    for first_cell, *cells in rows.rows:
        table.add_row(f"  {first_cell}", *cells)
    return table
