"""Jobs, trials, sizes and durations as table rows and as lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from search_spaces.knob_values import value_text
from search_spaces.outcome import Outcome, Purpose, StopReason
from search_spaces.quantities import number_text
from search_spaces.shared_records import AttemptProgress
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import JobRecord, TrialRecord

STYLES = {
    Outcome.OK: "green", Outcome.INFEASIBLE: "yellow", Outcome.INVALID: "yellow", Outcome.WRONG: "red", Outcome.FAILED: "red",
    Outcome.TIMEOUT: "red", Outcome.LOST: "red", Outcome.PRUNED: "cyan",
}  # fmt: skip


class TrialRows:
    """Describes trials in display order.

    A row shows every knob whose value differs from the baseline's or from the row above, and always `ALWAYS`. The baseline,
    and rows without a baseline, show the differences from the defaults.
    """

    def __init__(self, baseline: TrialConfig | None) -> None:
        """`baseline`: the configuration of trial 0; None: the first described trial is the baseline."""
        self._baseline = baseline
        self._above: TrialConfig | None = None

    def describe(self, config: TrialConfig) -> str:
        """The next row's knobs as `zero_stage=1 micro_batch_size=4 …`, in the order of the fields."""
        baseline, above = self._baseline or config, self._above or config
        self._baseline, self._above = baseline, config
        reference = TrialConfig() if config == baseline else baseline
        # Knobs that every row shows.
        shown = {"zero_stage", "micro_batch_size", *config.differences(reference), *config.differences(above)}
        return " ".join(f"{knob}={value_text(getattr(config, knob))}" for knob in KNOB_NAMES if knob in shown)

    def line(self, trial: TrialRecord) -> str:
        """A trial that has an outcome, on one line."""
        result = trial.result
        outcome = trial.outcome.value if trial.outcome else ""
        kind = "" if trial.purpose is Purpose.SEARCH else f" ({trial.purpose.value} {trial.repeat})"
        rate = f"{measured_text(result)} samples/s" if result and result.samples_per_second else ""
        message = result.message if result and result.message else ""
        observed = result.environment.get("observed_work", "") if result and trial.number == 0 else ""
        parts = [f"trial {trial.number}{kind}: {outcome}", rate, self.describe(trial.config), observed, message]
        return "  ".join(part for part in parts if part)


class TextTable:
    """A table whose rows end with a text: beside the figures if the terminal is wide enough for it, else below them."""

    def __init__(self, text: str, *columns: str) -> None:
        """`text`, `columns`: headings. A column is aligned to the right, except `outcome`."""
        self._heading, self._columns = text, columns
        self._rows: list[tuple[tuple[str, ...], str, str]] = []

    def add_row(self, *cells: str, text: str, style: str = "") -> None:
        """Add one row."""
        self._rows.append((cells, text, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A word of the text is only broken if it is longer than a line."""
        figures = self._table(has_text=False)
        beside = options.max_width - Measurement.get(console, options, figures).maximum - 2
        if beside >= max(36, *(len(word) for _, text, _ in self._rows for word in text.split())):
            yield self._table(has_text=True)
            return
        heading, *lines = console.render_lines(figures, options, pad=False)
        yield Segments(heading, new_lines=False)
        yield Segment.line()
        for line, (_, text, style) in zip(lines, self._rows, strict=True):
            yield Segments(line, new_lines=False)
            yield Segment.line()
            if text:
                yield Padding(Text(text, style), (0, 0, 0, 4), expand=False)

    def _table(self, has_text: bool) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in self._columns:
            table.add_column(name, justify="left" if name == "outcome" else "right", no_wrap=True)
        if has_text:
            table.add_column(self._heading, overflow="fold", ratio=1)
        for cells, text, style in self._rows:
            table.add_row(*cells, *([Text(text)] if has_text else []), style=style)
        return table


class TrialTable:
    """A table of trials with their single measurements, row by row."""

    def __init__(self, baseline: TrialConfig | None) -> None:
        """`baseline`: as in `TrialRows`."""
        self._rows = TrialRows(baseline)
        self.table = TextTable("configuration", "trial", "samples/s [95 %]", "peak/rank", "outcome")

    def add(self, trial: TrialRecord, best: bool = False, state: str = "") -> None:
        """Add one trial; `state` is shown while it has no outcome."""
        result = trial.result
        outcome = trial.outcome
        refused = outcome is not None and trial.started is None
        label = state if outcome is None else f"{outcome.value.lower()}{' (not run)' if refused else ''}{' ★' if best else ''}"
        repeat = {Purpose.CONFIRM: f" ×{trial.repeat}", Purpose.CONTROL: " again"}.get(trial.purpose, "")
        self.table.add_row(
            f"{trial.number}{repeat}",
            measured_text(result) if result else "",
            bytes_text(result.peak_memory_bytes) if result and result.peak_memory_bytes else "",
            label,
            text=self._rows.describe(trial.config),
            style=("bold " if best else "") + (STYLES.get(outcome, "") if outcome else "dim"),
        )


def baseline_of(trials: Sequence[TrialRecord]) -> TrialConfig | None:
    """The configuration of trial 0, the baseline; None: `trials` lacks it."""
    return next((trial.config for trial in trials if trial.number == 0), None)


def measured_text(result: TrialResult) -> str:
    """A trial's rate: `≤ 80.1` if it was pruned (an upper bound), `~123.4 [120.1, 126.7]` if it is extrapolated."""
    if result.outcome is Outcome.PRUNED and result.samples_per_second is not None:
        return f"≤ {number_text(result.samples_per_second.high)}"
    return ("~" if result.extrapolated else "") + rate_text(result.samples_per_second)


def first_text(items: Sequence[object], most: int) -> str:
    """The first items, `0, 1, 2, …`."""
    return ", ".join([*map(str, items[:most]), *["…"] * (len(items) > most)])


def rate_text(interval: Interval | None) -> str:
    """`123.4 [120.1, 126.7]`."""
    return f"{number_text(interval.mean)} [{number_text(interval.low)}, {number_text(interval.high)}]" if interval else "-"


def state_text(job: JobRecord) -> str:
    """`succeeded (BUDGET)`."""
    return f"{state_word(job.state, job.reason)}{f' ({job.reason})' if job.reason else ''}"


def state_word(state: str, reason: str) -> str:
    """The state in lower case; a job that ended without a configuration that fits is not called succeeded."""
    return "nothing fits" if reason == StopReason.NOTHING_FEASIBLE else state.lower()


def labels_text(request: Mapping[str, Any]) -> str:
    """`name nightly; tags smoke a100; note …`, only the fields that the request has."""
    labels = {
        "name": request.get("name"),
        "tags": " ".join(request.get("tags") or ()),
        "note": request.get("note"),
        "team": request.get("team"),
    }
    return "; ".join(f"{field} {text}" for field, text in labels.items() if text)


def model_text(job: JobRecord) -> str:
    """The model's name; for a file without a name in the request, its path."""
    return str((job.request.get("resolved_model") or {}).get("name") or job.request.get("model", ""))


def place_text(job: JobRecord) -> str:
    """`llama-tiny on local with 2 ranks`, only the parts that the request states."""
    request = job.request
    cluster = request.get("resolved_cluster") or {}
    ranks = cluster.get("nodes", 0) * cluster.get("devices_per_node", 0) or request.get("ranks")
    return f"{model_text(job)} on {cluster.get('name') or request.get('cluster', '')}" + (
        f" with {ranks} ranks" if ranks else ""
    )


def progress_text(record: AttemptProgress) -> str:
    """`measure 12, 103.5/s`."""
    rate = f", {number_text(record.samples_per_second)}/s" if record.samples_per_second else ""
    return f"{record.phase}{f' {record.step}' if record.step else ''}{rate}"


def bytes_text(count: float | None) -> str:
    """`1.23 GiB`, three digits; a dash for None."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{number_text(count, 3)} {unit}"
        count /= 1024
    return f"{number_text(count, 3)} GiB"


def duration_text(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    whole = max(int(seconds), 0)
    hours, remainder = divmod(whole, 3600)
    return f"{hours}:{remainder // 60:02}:{remainder % 60:02}" if hours else f"{remainder // 60}:{remainder % 60:02}"
