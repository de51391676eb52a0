"""Charts of a running sweep above its live table: samples/s over memory, and the best so far over trials."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from rich.cells import cell_len
from rich.text import Text

from autotune.objective.ranking import Ranking, peak_bytes, rate
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import measured_baseline
from autotune.outcome.verdict import JobVerdict
from autotune.request.job_fields import Objective
from autotune.session.session import Session
from autotune.text.console import Console
from autotune.text.rows import STYLES, bytes_text
from search_spaces.outcome import Outcome
from storage.records import TrialRecord

Point = tuple[float, float]
"""Position as a share of the width from the left and of the height from the bottom, 0 to 1; values outside are clipped."""


class Canvas:
    """A grid of columns and rows of cells. Later drawing covers earlier drawing."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._cells: dict[tuple[int, int], tuple[str, str]] = {}
        self._dots: dict[tuple[int, int], int] = {}

    def mark(self, at: Point, character: str, style: str = "") -> None:
        """Draw one character."""
        self._cells[_place(at[0], self.columns), _place(1 - at[1], self.rows)] = (character, style)

    def across(self, height: float, character: str, style: str = "") -> None:
        """Draw a horizontal line."""
        for column in range(self.columns):
            self._cells[column, _place(1 - height, self.rows)] = (character, style)

    def upright(self, position: float, character: str, style: str = "") -> None:
        """Draw a vertical line."""
        for row in range(self.rows):
            self._cells[_place(position, self.columns), row] = (character, style)

    def stairs(self, points: Sequence[Point], style: str = "") -> None:
        """Draw a step line: horizontal from each point to the next, then vertical; the last step extends to the right edge."""
        steps = [(_place(x, 2 * self.columns), _place(1 - y, 4 * self.rows)) for x, y in points]
        for (column, row), (end, level) in zip(steps, [*steps[1:], (2 * self.columns - 1, steps[-1][1])], strict=True):
            for along in range(column, end + 1):
                self._dot(along, row, style)
            for between in range(min(row, level), max(row, level) + 1):
                self._dot(end, between, style)

    def lines(self) -> list[Text]:
        """The rows, from the top."""
        return [
            Text.assemble(*(self._cells.get((column, row), (" ", "")) for column in range(self.columns)))
            for row in range(self.rows)
        ]

    def _dot(self, column: int, row: int, style: str) -> None:
        cell = column // 2, row // 4
        # Bits of a Braille character's dots, by column and by row from the top [The Unicode Standard, Braille Patterns].
        dot = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))[column % 2][row % 4]
        self._dots[cell] = self._dots.get(cell, 0) | dot
        self._cells[cell] = (chr(0x2800 + self._dots[cell]), style)


def _place(share: float, count: int) -> int:
    """Index of the cell."""
    return min(max(int(share * count), 0), count - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartAxis:
    """A range of values."""

    low: float
    high: float
    text: Callable[[float], str]
    """Formats a value with its unit, in a few characters."""

    def share(self, value: float) -> float:
        """Position between the ends: 0 to 1 within the range."""
        return (value - self.low) / (self.high - self.low)


def axis_of(values: Sequence[float], text: Callable[[float], str]) -> ChartAxis:
    """An axis for these values, which must not be negative."""
    low, high = min(values), max(values)
    # So that marks do not lie on an axis. Equal values: a share of the value.
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return ChartAxis(low=max(low - margin, 0.0), high=high + margin, text=text)


def canvas_size(width: int, height: int, y: ChartAxis) -> tuple[int, int]:
    """Columns and rows of the canvas in a chart of this width and height; may be too few to draw."""
    return width - _label_width(y) - 1, height - 3


def chart(title: str, canvas: Canvas, x: ChartAxis, y: ChartAxis) -> list[Text]:
    """The lines: title, canvas with the limits of the vertical axis, horizontal axis, and its limits."""
    label_width = _label_width(y)
    width = label_width + 1 + canvas.columns
    lines = [Text(title, style="bold")]
    for row, drawn in enumerate(canvas.lines()):
        label = y.text(y.high) if row == 0 else y.text(y.low) if row == canvas.rows - 1 else ""
        lines.append(Text.assemble((f"{label:>{label_width}}{'┤' if label else '│'}", "dim"), drawn))
    lines.append(Text(f"{'':{label_width}}└{'─' * canvas.columns}", style="dim"))
    low, high = x.text(x.low), x.text(x.high)
    lines.append(Text(f"{'':{label_width}} {low}{high:>{max(canvas.columns - cell_len(low), 0)}}", style="dim"))
    for line in lines:
        line.truncate(width, pad=True)
    return lines


def _label_width(y: ChartAxis) -> int:
    return max(cell_len(y.text(y.low)), cell_len(y.text(y.high)))


HEIGHTS = (9, 15)
"""Minimum and maximum lines of a chart, which takes a third of the terminal."""


class ChartMark(StrEnum):
    """Meaning of a character in the charts; the characters differ in shape too, for readers who do not see colours."""

    BEST = "best"
    FRONT = "front"
    """On the Pareto front: no other trial is faster and smaller."""
    MEASURED = "measured"
    ENDED_EARLY = "ended early"
    """PRUNED: drawn at its upper bound."""
    MAY_NOT_WIN = "may not win"
    """Over the limit with its headroom, or unstable."""
    BASELINE = "baseline"
    LIMIT = "limit"


LOOKS = {
    ChartMark.BEST: ("★", "bold green"), ChartMark.FRONT: ("◆", "bold green"), ChartMark.MEASURED: ("●", STYLES[Outcome.OK]),
    ChartMark.ENDED_EARLY: ("▾", STYLES[Outcome.PRUNED]), ChartMark.MAY_NOT_WIN: ("○", STYLES[Outcome.INFEASIBLE]),
    ChartMark.BASELINE: ("■", "blue"), ChartMark.LIMIT: ("┊", "red"),
}  # fmt: skip


class LiveCharts:
    """Draws charts if the console is a terminal that supports the characters and is large enough; else there are no lines."""

    def __init__(self, session: Session, console: Console) -> None:
        self._session, self._console = session, console
        self._snapshot: JobSnapshot | None = None
        self._verdict: JobVerdict | None = None
        self._size = (0, 0)
        self._lines: list[Text] = []

    def lines(self, snapshot: JobSnapshot, verdict: JobVerdict | None) -> list[Text]:
        """The charts of a snapshot and its answer, redrawn if one of them or the terminal size has changed."""
        size = (self._console.width, self._console.height)
        if snapshot is not self._snapshot or verdict is not self._verdict or size != self._size:
            self._snapshot, self._verdict, self._size = snapshot, verdict, size
            self._lines = charts(self._session, snapshot, verdict, *size) if self._is_able() else []
        return self._lines

    def _is_able(self) -> bool:
        options = self._console.options
        return self._console.is_terminal and not (
            options.ascii_only or options.legacy_windows or self._console.is_dumb_terminal
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """Data of both charts."""

    ranking: Ranking
    trials: Sequence[TrialRecord]
    """Trials with a rate and a peak."""
    baseline: TrialRecord | None
    verdict: JobVerdict | None


def charts(session: Session, snapshot: JobSnapshot, verdict: JobVerdict | None, width: int, height: int) -> list[Text]:
    """Both charts for a terminal of this size; one if it is narrow, none if it is small or nothing was measured yet."""
    # On smaller terminals the table takes all lines.
    if height < 20 or width < 60:
        return []
    trials = [trial for trial in snapshot.searched if _reached(trial) and peak_bytes(trial)]
    if not trials:
        return []
    several = width >= 76
    gap = 2
    wide = min((width - gap) // 2 if several else width, 72)
    high = min(max(height // 3, HEIGHTS[0]), HEIGHTS[1]) - 1
    baseline = measured_baseline(snapshot, session.baselines)
    shown = _Shown(ranking=session.ranking, trials=trials, baseline=baseline, verdict=verdict)
    scatter, marks = _scatter(shown, wide, high)
    if several:
        beside = zip(scatter, _best_so_far(shown, wide, high), strict=True)
        scatter = [Text.assemble(left_line, " " * gap, right_line) for left_line, right_line in beside]
    return [*scatter, *_legend(session.ranking, marks, width)]


def _scatter(shown: _Shown, width: int, height: int) -> tuple[list[Text], set[ChartMark]]:
    """All measured trials, the most important ones drawn last; and the marks used."""
    ranking, trials, baseline, verdict = shown.ranking, shown.trials, shown.baseline, shown.verdict
    peaks = [float(peak_bytes(trial)) for trial in trials]
    limit = ranking.memory_limit_bytes
    # A distant limit would compress all points.
    limits = [float(limit)] if limit is not None and limit <= 1.5 * max(peaks) else []
    x, y = axis_of([*peaks, *limits], bytes_text), axis_of([_reached(trial) for trial in trials], _rate_text)
    canvas = Canvas(*canvas_size(width, height, y))
    for value in limits:
        canvas.upright(x.share(value), *LOOKS[ChartMark.LIMIT])
    marked = [(_mark(ranking, trial), trial) for trial in trials]
    marked += [(ChartMark.FRONT, trial) for trial in (verdict.standings.front() if verdict is not None else [])]
    marked += [(ChartMark.BASELINE, baseline)] if baseline is not None else []
    marked += [(ChartMark.BEST, verdict.best)] if verdict is not None else []
    for mark, trial in marked:
        canvas.mark((x.share(peak_bytes(trial)), y.share(_reached(trial))), *LOOKS[mark])
    drawn = {mark for mark, _ in marked} | ({ChartMark.LIMIT} if limit is not None else set())
    return chart("samples/s over peak memory of a rank", canvas, x, y), drawn


def _best_so_far(shown: _Shown, width: int, height: int) -> list[Text]:
    """The best value so far by trial, for the objective."""
    ranking, trials, baseline, verdict = shown.ranking, shown.trials, shown.baseline, shown.verdict
    least_memory = ranking.objective is Objective.MEMORY
    rate_of = verdict.standings.ranked_rate if verdict is not None else rate
    value, best = (peak_bytes, min) if least_memory else (rate_of, max)
    able = [(trial.number, float(value(trial))) for trial in trials if ranking.may_win(trial)]
    so_far = [*accumulate((reached for _, reached in able), best)]
    references = [float(value(baseline))] if baseline is not None else []
    y = axis_of([*so_far, *references] or [0.0], bytes_text if least_memory else _rate_text)
    x = ChartAxis(low=0.0, high=float(max(trials[-1].number, 1)), text=lambda number: f"trial {number:.0f}")
    canvas = Canvas(*canvas_size(width, height, y))
    for reached in references:
        canvas.across(y.share(reached), "┄", LOOKS[ChartMark.BASELINE][1])
    if able:
        canvas.stairs([(x.share(number), y.share(best)) for (number, _), best in zip(able, so_far, strict=True)], "green")
    return chart("lowest peak memory of a rank so far" if least_memory else "best samples/s so far", canvas, x, y)


def _mark(ranking: Ranking, trial: TrialRecord) -> ChartMark:
    if trial.outcome is Outcome.PRUNED:
        return ChartMark.ENDED_EARLY
    return ChartMark.MEASURED if ranking.may_win(trial) else ChartMark.MAY_NOT_WIN


def _reached(trial: TrialRecord) -> float:
    """Samples/s; for a pruned trial its upper bound, as in the table."""
    measured = trial.result.samples_per_second if trial.result is not None else None
    if measured is None:
        return 0.0
    return measured.high if trial.outcome is Outcome.PRUNED else measured.mean


def _legend(ranking: Ranking, marks: Collection[ChartMark], width: int) -> list[Text]:
    """The legend of the drawn marks, in as many lines as necessary."""
    lines = [Text()]
    legend_gap = "  "
    for mark in (mark for mark in ChartMark if mark in marks):
        name = f"{mark.value} {bytes_text(ranking.memory_limit_bytes)}" if mark is ChartMark.LIMIT else mark.value
        entry = Text.assemble(LOOKS[mark], (f" {name}", "dim"))
        if lines[-1] and lines[-1].cell_len + len(legend_gap) + entry.cell_len > width:
            lines.append(Text())
        lines[-1].append_text(Text(legend_gap if lines[-1] else "")).append_text(entry)
    return lines


def _rate_text(value: float) -> str:
    return f"{value:.4g}"
