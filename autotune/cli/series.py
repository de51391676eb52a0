"""`autotune scale`, and `sweep` with a series as objective: run several jobs in sequence, and combine their results."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from autotune.cli.documents import write_document
from autotune.cli.foreground import run_new
from autotune.cli.options import SweepOptions
from autotune.cli.status import Status
from autotune.exports.best_config_file import best_config_text
from autotune.ops.output import write_whole
from autotune.series.run import run_series
from autotune.series.series import SeriesEntry, SeriesRequest, SeriesResult, interval_text
from autotune.series.size_forecast import EquationForecast
from autotune.session.session import Session
from autotune.text.console import Console
from autotune.text.result import print_result
from autotune.tuning import TuneResult
from search_spaces.trial import Interval
from storage.address import default_database_url


def series_command(options: SweepOptions, fields: Mapping[str, Any], ranks: tuple[int, ...]) -> Status:
    """Run the series. Only the best configuration of the answer's size is written."""
    console = Console(stderr=True)
    shared = {name: value for name, value in fields.items() if name not in ("objective", "ranks")}
    series = SeriesRequest(objective=fields["objective"], fields=shared, ranks=ranks, **options.series)

    def sweep(session: Session) -> TuneResult:
        if not options.json:
            size = f"{session.world_size} ranks, samples of {session.request.sequence_length} tokens"
            console.print(size, style="bold", highlight=False, soft_wrap=True)
        return run_new(session, options, console)

    found = run_series(series, sweep, EquationForecast(database=options.database or default_database_url()))
    if found.best_config is not None:
        write_whole(options.out, best_config_text(found.best_config))
    _print(found, options)
    if found.interrupted:
        return Status.INTERRUPTED
    return Status.OK if found.answer is not None else Status.NOTHING_FEASIBLE


def _print(found: SeriesResult, options: SweepOptions) -> None:
    if options.json:
        write_document(found.document())
        return
    console = Console()
    print_result(found.best_config, console)
    console.print(_table(found.entries), highlight=False)
    console.print(f"{found.objective}: {found.message}", highlight=False, markup=False, soft_wrap=True)
    if found.best_config is not None:
        console.print(f"written to {options.out}", highlight=False, markup=False, soft_wrap=True)


def _table(entries: tuple[SeriesEntry, ...]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for name in ("ranks", "tokens", "samples/s [95 %]"):
        table.add_column(name, justify="right")
    priced = any(entry.cost is not None for entry in entries)
    if priced:
        table.add_column("per million tokens", justify="right")
    scaled = any(entry.efficiency is not None for entry in entries)
    if scaled:
        table.add_column("efficiency", justify="right")
    table.add_column("")
    for entry in entries:
        costs = (*((_text(entry.cost),) if priced else ()), *((_share(entry.efficiency),) if scaled else ()))
        job = f"job {entry.job_id}: " if entry.job_id is not None else ""
        table.add_row(
            str(entry.ranks), str(entry.sequence_length), _text(entry.samples_per_second), *costs, f"{job}{entry.message}"
        )
    return table


def _share(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.mean:.0%} [{interval.low:.0%}, {interval.high:.0%}]"


def _text(interval: Interval | None) -> str:
    return "-" if interval is None else interval_text(interval)
