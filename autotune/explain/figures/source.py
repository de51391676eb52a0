"""What figures are made with: the job's data, each part read when the first figure needs it, tables, numbers with units."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError, NoBestError
from autotune.explain.evidence import ExplanationEvidence, Forecast, evidence_of, question_of_job, trials_text
from autotune.explain.figures.points import JobPoints
from autotune.forecast import InitialForecaster, initial_forecaster_of, unknown_model
from autotune.objective.ranking import Ranking
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.prediction.cases.config_cases import predictable
from autotune.prediction.equations.coefficients import rates_for
from autotune.request.job_fields import Objective
from autotune.session.resolve import session_of
from autotune.session.session import Session
from autotune.strategies.guided.prior import Prior
from autotune.wire.figures import Cell, Column, Figure, Mark, Table
from autotune.wire.trials import Points
from executor.errors import ExecutorError
from search_spaces.errors import SearchSpaceError
from search_spaces.knob_values import value_text
from search_spaces.outcome import JobState
from search_spaces.quantities import number_text, ratio_text
from search_spaces.trial import Interval
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import TrialRecord

if TYPE_CHECKING:
    from storage.store import Store


class FigureUnit(StrEnum):
    """What a number counts. The values are exported: never rename one."""

    NONE = ""
    """A name, a count, or a value of a knob."""
    RATE = "samples/s"
    BYTES = "bytes"
    SECONDS = "seconds"
    SHARE = "share"
    """1 is the whole."""
    RATIO = "times"
    FLOPS = "FLOP"
    ELEMENTS = "elements"


def column(name: str, title: str, values: Iterable[Any], unit: FigureUnit = FigureUnit.NONE) -> Column:
    """A column; values that are not finite become None."""
    return Column(name=name, title=title, values=tuple(map(_cell, values)), unit=unit)


def table(name: str, title: str, columns: Sequence[Column]) -> Table:
    """A table of these columns."""
    return Table(name=name, title=title, columns=tuple(columns))


def _cell(value: Any) -> Cell:
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def varying(trials: Iterable[TrialRecord]) -> list[str]:
    """The knobs in which trials differ, in display order."""
    configs = [trial.config for trial in trials]
    return [name for name in KNOB_NAMES if len({getattr(config, name) for config in configs}) > 1]


def config_text(config: TrialConfig, knobs: Collection[str] = ()) -> str:
    """`zero_stage=1 micro_batch_size=2`: the values of these knobs that are not defaults, and always those of `ALWAYS`."""
    # Knobs that are always shown.
    always = ("zero_stage", "micro_batch_size")
    shown = [name for name in KNOB_NAMES if name in always or (name in knobs and getattr(config, name) != _DEFAULTS[name])]
    return " ".join(f"{name}={value_text(getattr(config, name))}" for name in shown)


def limit_marks(ranking: Ranking) -> tuple[Mark, ...]:
    """The memory limit of a rank, and the limit less the headroom."""
    limit, capacity = ranking.memory_limit_bytes, ranking.capacity_bytes
    if not limit:
        return ()
    marks = (Mark(axis="x", name="limit", title=f"limit {bytes_text(limit)}", value=float(limit)),)
    less_headroom = Mark(axis="x", name="capacity", title=f"less headroom {bytes_text(capacity)}", value=capacity)
    return (*marks, less_headroom) if capacity < limit else marks


def counted(count: int, noun: str) -> str:
    """`1 trial`, `3 trials`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_DEFAULTS = {name: getattr(TrialConfig(), name) for name in KNOB_NAMES}


def bytes_text(count: float | None) -> str:
    """`1.23 GiB`, three digits; a dash for None."""
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} GiB" if abs(count) < 1000 else f"{count:,.0f} GiB"


def seconds_text(seconds: float | None) -> str:
    """`12.3 s`, `12.3 ms`; from ten minutes on `4:05:12`."""
    if seconds is None:
        return "–"
    size = abs(seconds)
    if size >= 600:
        whole = round(seconds)
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    if size >= 1 or size == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def rate_text(rate: float | None) -> str:
    """`123.4`, `12,345`."""
    if rate is None:
        return "–"
    return number_text(rate)


def flops_text(count: float | None) -> str:
    """`1.23 TFLOP`."""
    if count is None:
        return "–"
    for factor, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.3g} FLOP"


def share_text(share: float | None) -> str:
    """`12.3 %`."""
    return "–" if share is None else f"{share * 100:.1f} %"


def percent(share: float) -> str:
    """`12 %` with a no-break space."""
    return f"{share * 100:.0f}\u00a0%"


def cell_text(value: Cell, unit: str) -> str:
    """A cell of a column with this unit."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, str):
        return value
    text = _TEXTS.get(unit)
    if text is not None:
        return text(value)
    return f"{value:,}" if isinstance(value, int) else value_text(float(f"{value:.4g}"))


def _ratio_text(ratio: float | None) -> str:
    return "–" if ratio is None else ratio_text(ratio)


_TEXTS: dict[str, Callable[[float | None], str]] = {
    FigureUnit.BYTES: bytes_text,
    FigureUnit.SECONDS: seconds_text,
    FigureUnit.RATE: rate_text,
    FigureUnit.FLOPS: flops_text,
    FigureUnit.SHARE: share_text,
    FigureUnit.RATIO: _ratio_text,
}


MakeFigure = Callable[..., Figure]
"""Makes the figure, whose name and title are set: see `figure_of`."""


class FigureSource:
    """A job's rows as they were when the first figure read them. A part that is not available is None; `lacking` says why."""

    def __init__(self, store: "Store", job_id: str) -> None:
        """`job_id` may be a unique prefix.

        Raises:
            UnknownJobError: there is no such job.
        """
        self.store = store
        self.job = store.jobs.get(job_id)
        self._problem = ""

    @cached_property
    def snapshot(self) -> JobSnapshot:
        """The job's trials; their results have only the figures."""
        return read_snapshot(self.store, self.job.id)

    @cached_property
    def session(self) -> Session | None:
        """The resolved request; None: this version cannot read it."""
        try:
            return session_of(self.job)
        except (AutotuneError, SearchSpaceError, ExecutorError) as error:
            self._problem = str(error)
            return None

    @cached_property
    def points(self) -> Points | None:
        """The trials as columns; None: this version cannot read the job's request."""
        if self.session is None:
            return None
        return JobPoints(self.store, self.job, self.session, self.initial_forecaster).of(self.snapshot)

    @cached_property
    def evidence(self) -> ExplanationEvidence | None:
        """The input of an explanation; None: no trial has won yet."""
        try:
            return evidence_of(self.store, self.session, self.snapshot) if self.session is not None else None
        except NoBestError:
            return None

    @cached_property
    def forecast(self) -> Forecast | None:
        """The forecast after the job's trials; None: the equations do not know the model."""
        if self.evidence is not None:
            return self.evidence.outlook
        question = question_of_job(self.store, self.session) if self.session is not None else None
        if question is None or self.session is None:
            return None
        return Forecast(self.session, self.snapshot, Prior(rates=question.rates, source=question.calibration_source))

    @cached_property
    def stand_in_forecast(self) -> Forecast | None:
        """The forecast for a transformer of the model's size after the job's trials; None: the request cannot be read."""
        if self.session is None:
            return None
        rates = rates_for(self.session.cluster, self.session.request.engine)
        return Forecast(self.session, self.snapshot, Prior(rates=rates))

    @cached_property
    def initial_forecaster(self) -> InitialForecaster | None:
        """The forecast before the job's first trial; None: the equations do not know the model."""
        return initial_forecaster_of(self.store, self.job.id, self.session) if self.session is not None else None

    @property
    def objective(self) -> Objective:
        """The job's objective; throughput if the request cannot be read."""
        return self.session.ranking.objective if self.session is not None else Objective.THROUGHPUT

    @property
    def unpredicted(self) -> str:
        """Why the equations do not know the model; empty: they do."""
        if self.session is None:
            return self.lacking()
        if predictable(self.session.model, self.session.space) is not None:
            return ""
        reason = unknown_model(self.session.model)
        return f"{reason[0].upper()}{reason[1:]}."

    def rate_of(self, trial: TrialRecord) -> Interval | None:
        """Samples/s of a search trial's configuration from all its measurements; None: it was not measured."""
        if self.evidence is not None:
            return self.evidence.verdict.rate(trial)
        return trial.result.samples_per_second if trial.result is not None else None

    def lacking(self, missing: str = "winner") -> str:
        """Why there is nothing to show, in one sentence."""
        if self.session is None:
            return f"This version cannot read the job's request: {self._problem}."
        if not self.snapshot.searched:
            if self.job.state is JobState.QUEUED:
                return "The job waits for a worker: no trial has started."
            if self.job.state is JobState.RUNNING:
                return "The job has begun: no trial has ended yet."
            return f"No trial has ended: {self.job.message or self.job.state.lower()}."
        return f"There is no {missing}: {trials_text(self.snapshot)}."
