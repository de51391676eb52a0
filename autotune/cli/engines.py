"""`autotune engines`: the values of each knob that the engines honour, and the combinations that they refuse."""

import sys

from rich.table import Table

from autotune.cli.engine_reference import (
    Row,
    engines_page_markdown,
    knob_head,
    knob_rows,
    refused_head,
    refused_rows,
    schedule_head,
    schedule_rows,
)
from autotune.cli.status import Status
from autotune.request.engines import CAPABILITIES, why_unusable
from autotune.text.console import Console

NAMES = (knob_head()[0], schedule_head()[0], *refused_head()[:2])
"""Columns whose cells are names, which must not wrap."""


def engines_command(as_markdown: bool) -> Status:
    """Print the tables of docs/engines.md, or that file itself."""
    if as_markdown:
        sys.stdout.write(engines_page_markdown())
        return Status.OK
    console = Console()
    for head, rows in ((knob_head(), knob_rows()), (schedule_head(), schedule_rows())):
        _print(head, rows, console)
        console.print()
    console.print("refused combinations", style="bold")
    _print(refused_head(), refused_rows(), console)
    for engine in CAPABILITIES:
        if refusal := why_unusable(engine):
            console.print(
                f"\nengine {engine}: {refusal.message}; {refusal.remedy}", markup=False, highlight=False, soft_wrap=True
            )
    return Status.OK


def _print(head: Row, rows: list[Row], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, overflow="fold", no_wrap=name in NAMES)
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)
