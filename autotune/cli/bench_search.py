"""`autotune bench-search`: compare strategies on a table of measurements."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from autotune.cli.report_document import print_document
from autotune.cli.status import Status
from autotune.cli.validate import informed_predictor
from autotune.errors import RequestError
from autotune.evaluation.search_benchmark.markdown import (
    DECISIONS,
    TITLES,
    WASTED,
    Document,
    budgets,
    families,
    left_out,
    markdown_page,
    method_lines,
    score_rows,
    waste_rows,
)
from autotune.evaluation.search_benchmark.report import bench_search
from autotune.evaluation.search_benchmark.tournament import Progress, Rounds
from autotune.evaluation.validation.folds import Calibration
from autotune.evaluation.validation.outcomes import NO_LABELS, read_labels
from autotune.evaluation.validation.table import read_table
from autotune.ops.output import require_writable
from autotune.text.console import Console

_SHOWN = 12
"""Maximum lines about omitted data on the console; the JSON and the Markdown page have all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSearchOptions:
    """Parsed options of the command."""

    table: Path
    strategies: str
    calibrate: str
    trials: int
    seeds: int
    min_timed: int
    seed: int
    labels: Path | None
    knowledge: str | None
    processes: int
    markdown: Path | None
    json: bool


def bench_search_command(options: BenchSearchOptions) -> Status:
    """Run the benchmark and print the results."""
    rounds = Rounds(
        strategies=tuple(name for each in options.strategies.split(",") if (name := each.strip())),
        calibrate=_calibration(options.calibrate),
        trials=options.trials,
        seeds=options.seeds,
        min_timed=options.min_timed,
        seed=options.seed,
        processes=options.processes,
    )
    if options.markdown:
        require_writable(options.markdown)
    table = read_table(options.table)
    labels = read_labels(options.labels) if options.labels else NO_LABELS
    predictor = None if options.knowledge is None else informed_predictor(options.knowledge, table, rounds.calibrate)
    with _progress() as progress:
        document = bench_search(table, rounds, labels, predictor, progress)
    print_document(document, markdown_page, options.markdown, options.json, _print)
    return Status.OK


def _calibration(name: str) -> Calibration:
    modes = [mode for mode in Calibration if mode is not Calibration.FEW_ROWS]
    if name not in modes:
        raise RequestError("calibrate", f"{name!r} is not a mode", f"use one of {', '.join(modes)}")
    return Calibration(name)


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show progress on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status("reading the table") as status:
        yield lambda what, done, total: status.update(f"{done} of {total} {what}")


def _print(document: Document) -> None:
    console = Console()
    for sentence in method_lines(document):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    for source, figures in families(document) if document["groups"] else ():
        console.print()
        groups = f"{figures['group_count']} group{'s' * (figures['group_count'] != 1)}"
        console.print(f"{source}: {groups}", highlight=False, markup=False, style="bold", soft_wrap=True)
        for score, title in TITLES.items():
            _print_table(console, title, budgets(document), score_rows(figures, score))
        headings = [*(name for _, name in WASTED), *(name for _, name in DECISIONS)]
        _print_table(console, "Of the first ten trials, and time", headings, waste_rows(figures))
    _print_left_out(console, list(left_out(document)))


def _print_table(console: Console, title: str, headings: list[str], rows: list[list[str]]) -> None:
    shown = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    shown.add_column("", min_width=18, max_width=30, overflow="fold")
    for heading in headings:
        shown.add_column(heading, justify="right")
    for name, *cells in rows:
        shown.add_row(Text(name), *cells)
    console.print(shown, highlight=False)


def _print_left_out(console: Console, lines: list[str]) -> None:
    if len(lines) > _SHOWN:
        lines = [*lines[:_SHOWN], f"… and {len(lines) - _SHOWN} more: see --json or --markdown"]
    if lines:
        console.print()
    for line in lines:
        console.print("left out, " + " ".join(line.split()), highlight=False, markup=False, soft_wrap=True)
