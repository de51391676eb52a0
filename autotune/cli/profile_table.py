"""Print a profile as a table."""

from collections.abc import Callable, Sequence
from math import floor, log10

from rich.measure import Measurement
from rich.table import Table

from autotune.cli.profile_tree import OWN, Row
from autotune.session.session import Session
from autotune.text.console import Console
from executor.measurement.module_profile import ModelProfile
from search_spaces.trial_config import TrialConfig

PHASES = ("forward", "backward", "recompute")
DIGITS = 4
"""Significant digits of a column's largest number; all its numbers have the same number of decimals."""


def print_profile(
    session: Session, config: TrialConfig, profile: ModelProfile, rows: Sequence[Row], hfu: float | None, console: Console
) -> None:
    """Print what was profiled, the table, and the totals of a step."""
    for line in (_heading(session, config, profile), "Figures are per optimizer step; a row includes its sub-modules."):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    _print_whole(console, _table(profile, rows, classes=True), _table(profile, rows, classes=False))
    for line in _sums(profile, rows[0], hfu):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(session: Session, config: TrialConfig, profile: ModelProfile) -> str:
    parameters = sum(module.parameters for module in profile.modules)
    batches = f"{profile.micro_batches} micro-batch{'es' if profile.micro_batches != 1 else ''}"
    size = f"{config.micro_batch_size} x {session.request.sequence_length} tokens"
    device = profile.environment.get("device", "")
    threads = profile.environment.get("threads_per_rank")
    where = f"{device}, {threads} thread{'s' if threads != '1' else ''}" if session.cluster.device.kind == "cpu" else device
    return f"{session.model.name}: {parameters:,} parameters, {config.precision}, {batches} of {size}, on {where}"


def _print_whole(console: Console, *tables: Table) -> None:
    """Print the first table that fits, else the last one in full width, because truncated figures are useless."""
    wide = console.options.update(max_width=1_000)
    widths = [Measurement.get(console, wide, table).maximum for table in tables]
    chosen = next((index for index, width in enumerate(widths) if width <= console.width), len(tables) - 1)
    console.width = max(console.width, widths[chosen])
    console.print(tables[chosen], highlight=False, markup=False)


def _table(profile: ModelProfile, rows: Sequence[Row], *, classes: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("\nmodule", no_wrap=True)
    if classes:
        table.add_column("\nclass", no_wrap=True, style="dim")
    columns = [_column("\nparameters", lambda row: row.parameters, rows, 0)]
    model = rows[0]
    scale, unit = _scale(model.flops.total)
    # Recompute is shown only if something is recomputed.
    phases = [phase for phase in PHASES if phase != "recompute" or model.flops.recompute or model.seconds.recompute]
    for phase in phases:
        columns.append(_column(f"{phase}\n{unit}", lambda row, of=phase: getattr(row.flops, of) / scale, rows))  # type: ignore[misc]
    for phase in phases:
        columns.append(_column(f"{phase}\nms", lambda row, of=phase: getattr(row.seconds, of) * 1e3, rows))  # type: ignore[misc]
    columns.append(_column("step\n%", lambda row: 100 * row.seconds.total / profile.hooked_seconds, rows, 1))
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        names = [_label(row), row.kind] if classes else [_label(row)]
        table.add_row(*names, *(cells[index] for _, cells in columns), style="dim" if row.label == OWN else "")
    outside = f"{100 * profile.outside_seconds / profile.hooked_seconds:.1f}"
    table.add_row("(outside the model)", *[""] * (len(columns) - 1 + classes), outside, style="dim")
    return table


def _column(
    title: str, figure: Callable[[Row], float], rows: Sequence[Row], decimals: int | None = None
) -> tuple[str, list[str]]:
    """The title and the cells, with the same number of decimals so that decimal points align."""
    figures = [figure(row) for row in rows]
    if decimals is None:
        largest = max(figures)
        decimals = max(DIGITS - 1 - floor(log10(largest)), 0) if largest else 0
    return title, [f"{value:,.{decimals}f}" if value else "-" for value in figures]


def _label(row: Row) -> str:
    # Only for merged blocks: their sub-modules have the same count.
    return "  " * row.depth + row.label + (f" (x{row.count})" if "-" in row.label else "")


def _scale(flops: float) -> tuple[float, str]:
    """The unit in which the model's FLOPs are at least 1."""
    for factor, unit in ((1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= factor:
            return factor, unit
    return 1e6, "MFLOP"


def _sums(profile: ModelProfile, model: Row, hfu: float | None) -> list[str]:
    seconds = model.seconds
    again = f" + recompute {_time(seconds.recompute)}" if seconds.recompute else ""
    rate = profile.flops / profile.step_seconds
    share = "" if hfu is None else f", HFU {hfu:.1%}"
    parts = f"forward {_time(seconds.forward)} + backward {_time(seconds.backward)}{again}"
    outside = f"outside the model {_time(profile.outside_seconds)} (update, clipping, reduction)"
    done = f"{profile.flops / 1e9:,.4g} GFLOP per step are {rate / 1e9:,.3g} GFLOP/s{share}"
    return [
        f"{_time(profile.hooked_seconds)} total = {parts} + {outside}",
        f"a step without the profiler's hooks takes {_time(profile.step_seconds)}; {done}; medians of {profile.repeats} steps",
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"
