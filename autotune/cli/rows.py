"""Trials as rows of a table."""

from rich.table import Table

from autotune.cli.sizes import bytes_text
from autotune.jobs.session import Session
from search_spaces.knobs import value_text
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval
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


def add_trial_row(table: Table, session: Session, trial: TrialRecord, best: bool = False, state: str = "") -> None:
    """One trial; `state` is shown while it has no outcome."""
    result = trial.result
    outcome = trial.outcome
    refused = outcome is not None and trial.started is None
    told = state if outcome is None else f"{outcome.value.lower()}{' (not run)' if refused else ''}{' ★' if best else ''}"
    repeat = f" ×{trial.repeat}" if trial.purpose is Purpose.CONFIRM else ""
    table.add_row(
        f"{trial.number}{repeat}",
        describe(trial.config, session),
        rate_text(result.samples_per_second) if result else "",
        bytes_text(result.peak_memory_bytes) if result and result.peak_memory_bytes else "",
        told,
        style=("bold " if best else "") + (STYLES.get(outcome, "") if outcome else "dim"),
    )


def describe(config: TrialConfig, session: Session) -> str:
    """The values of the knobs that are searched and matter here, in the order of the knobs."""
    defaults = TrialConfig()
    searched = [knob for knob, values in session.space.domains.items() if len(values) > 1]
    shown = [
        knob
        for knob in config.values()
        if knob in ("zero_stage", "micro_batch_size") or (knob in searched and getattr(config, knob) != getattr(defaults, knob))
    ]
    return " ".join(f"{knob}={value_text(getattr(config, knob))}" for knob in shown)


def rate_text(interval: Interval | None) -> str:
    """`123.4 [120.1, 126.7]`."""
    return f"{interval.mean:.4g} [{interval.low:.4g}, {interval.high:.4g}]" if interval else "-"
