"""Trials as rows of a table, and as lines."""

from collections.abc import Collection, Iterable

from rich.table import Table

from autotune.cli.sizes import bytes_text
from search_spaces.knobs import value_text
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

STYLES = {
    Outcome.OK: "green", Outcome.INFEASIBLE: "yellow", Outcome.INVALID: "yellow", Outcome.WRONG: "red", Outcome.FAILED: "red",
    Outcome.TIMEOUT: "red", Outcome.LOST: "red", Outcome.PRUNED: "cyan",
}  # fmt: skip


def trial_table() -> Table:
    """An empty table of trials."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("trial", justify="right")
    table.add_column("configuration", overflow="fold", ratio=1)
    table.add_column("samples/s [95 %]", justify="right", no_wrap=True)
    table.add_column("peak/rank", justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    return table


def add_trial_row(table: Table, knobs: Collection[str], trial: TrialRecord, best: bool = False, state: str = "") -> None:
    """One trial, with the values of these knobs; `state` is shown while it has no outcome."""
    result = trial.result
    outcome = trial.outcome
    refused = outcome is not None and trial.started is None
    told = state if outcome is None else f"{outcome.value.lower()}{' (not run)' if refused else ''}{' ★' if best else ''}"
    repeat = {Purpose.CONFIRM: f" ×{trial.repeat}", Purpose.CONTROL: " again"}.get(trial.purpose, "")
    table.add_row(
        f"{trial.number}{repeat}",
        describe(trial.config, knobs),
        measured_text(result) if result else "",
        bytes_text(result.peak_memory_bytes) if result and result.peak_memory_bytes else "",
        told,
        style=("bold " if best else "") + (STYLES.get(outcome, "") if outcome else "dim"),
    )


def trial_line(trial: TrialRecord, knobs: Collection[str]) -> str:
    """A trial that has its outcome, on one line."""
    result = trial.result
    outcome = trial.outcome.value if trial.outcome else ""
    kind = "" if trial.purpose is Purpose.SEARCH else f" ({trial.purpose.value} {trial.repeat})"
    told = f"{measured_text(result)} samples/s" if result and result.samples_per_second else ""
    message = result.message if result and result.message else ""
    parts = [f"trial {trial.number}{kind}: {outcome}", told, describe(trial.config, knobs), message]
    return "  ".join(part for part in parts if part)


def describe(config: TrialConfig, knobs: Collection[str]) -> str:
    """The values of these knobs that are no defaults, and always of the two that everybody asks for, in their order."""
    defaults = TrialConfig()
    shown = [
        knob
        for knob in config.values()
        if knob in ("zero_stage", "micro_batch_size") or (knob in knobs and getattr(config, knob) != getattr(defaults, knob))
    ]
    return " ".join(f"{knob}={value_text(getattr(config, knob))}" for knob in shown)


def varying_knobs(trials: Iterable[TrialRecord]) -> set[str]:
    """The knobs in which the trials differ."""
    values: dict[str, set[object]] = {}
    for trial in trials:
        for knob, value in trial.config.every_value().items():
            values.setdefault(knob, set()).add(value)
    return {knob for knob, found in values.items() if len(found) > 1}


def measured_text(result: TrialResult) -> str:
    """A trial's rate: `≤ 80.1` where it was ended because it could reach no more, `~123.4 [120.1, 126.7]` if extrapolated."""
    if result.outcome is Outcome.PRUNED and result.samples_per_second is not None:
        return f"≤ {result.samples_per_second.high:.4g}"
    return ("~" if result.extrapolated else "") + rate_text(result.samples_per_second)


def rate_text(interval: Interval | None) -> str:
    """`123.4 [120.1, 126.7]`."""
    return f"{interval.mean:.4g} [{interval.low:.4g}, {interval.high:.4g}]" if interval else "-"
