"""Response models of `GET /v1/jobs/{id}/points`."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel

from api.prediction import IntervalView
from storage.records import JobRecord

Plain = dict[str, Any]


class KnobColumn(BaseModel):
    """A knob that is searched or has several values. If it appears later, all earlier trials had its first value."""

    name: str
    unit: str
    values: list[Any]
    """Values by code, in the order of their first use; the list only grows."""
    codes: list[int]
    """A code for each row."""


class GainView(BaseModel):
    """The gain of the best over the baseline: a ratio with its 95 % interval."""

    of: str
    """samples_per_second, or peak_memory_bytes if memory is the objective."""
    mean: float
    low: float
    high: float


class StandingView(BaseModel):
    """A configuration that may be the answer, or the baseline."""

    trial: int
    rate: IntervalView
    """Samples/s from all measurements of the configuration, with a 95 % interval."""
    repeats: int
    """Number of measurements from which the rate is computed."""


class AnswerView(BaseModel):
    """The job's answer so far; configurations are given as trial numbers."""

    keeps_baseline: bool
    """Whether the answer is to keep the baseline, because no tried configuration is known to be better."""
    trial: int
    """The answer."""
    rate: IntervalView
    """Its samples/s from all measurements of its configuration, with a 95 % interval."""
    baseline: int | None
    baseline_rate: IntervalView | None
    gain: GainView | None
    runner_up: int | None
    runner_up_ratio: IntervalView | None
    """The runner-up's samples/s divided by the answer's."""
    tie: bool
    """Whether the measurements do not separate the two."""
    probability_best: float
    """Probability that no tried configuration is better than the answer."""
    expected_loss: float
    """Expected shortfall of the answer's rate, as a share of the best tried configuration's rate."""


def answer_view(job: JobRecord) -> AnswerView | None:
    """The view of a job's answer; None: there is none, or it is damaged (a list must not fail because of one job)."""
    try:
        return None if job.answer is None else AnswerView(**job.answer)
    except (TypeError, ValueError):
        return None


class VerdictView(AnswerView):
    """The answer, with all configurations that may be the answer."""

    standings: list[StandingView]
    """Every contender: the answer, then by rate."""


class PointColumns(BaseModel):
    """Each column has one value per row; null: no value (yet)."""

    number: list[int]
    outcome: list[int | None]
    """Code of a word in `outcomes`; null: queued or running."""
    purpose: list[int]
    fidelity: list[int]
    repeat: list[int]
    attempts: list[int]
    """Number of started attempts; 0: the trial waits."""
    eligible: list[int]
    """1: the trial may win, because it is measured, stable, and within the capacity."""
    cause: list[int | None]
    """Code of the rule or of the failure-table row that determined the outcome."""
    rate: list[float | None]
    """Samples/s; `low` and `high` are its 95 % interval. For a pruned trial `high` is its upper bound."""
    low: list[float | None]
    high: list[float | None]
    peak: list[int | None]
    """Bytes of the highest rank."""
    predicted_rate: list[float | None]
    """Samples/s as predicted before the job's first trial."""
    predicted_peak: list[int | None]
    started: list[float | None]
    """Seconds after `epoch`, for the running attempt or the one whose result counts."""
    finished: list[float | None]
    node: list[int | None]
    """Code of the first rank's node."""


class PointsView(BaseModel):
    """A job's trials as columns: all trials, or the changed ones, which replace the rows with their numbers."""

    job: str
    state: str
    version: int
    """`since` of the next request."""
    whole: bool
    """Whether all trials are given, so that the client must discard its rows."""
    count: int
    """Number of trials of the job. A client with fewer rows after this response should request all."""
    epoch: datetime
    """When the job was created."""
    objective: str
    limit_bytes: int | None
    """Memory limit of a rank; null: not known."""
    capacity_bytes: int | None
    """The limit less the headroom; a configuration that needs more cannot win."""
    rests_on: str | None
    """In words, the source of the predictions; null: there are no predictions for this model."""
    seconds_left: float | None
    """Upper estimate from the job's pace, with controls and confirmations; null: it will not go on, or no trial has ended."""
    front: list[int]
    """Numbers of the trials on the Pareto front of samples/s and memory, fastest first."""
    best: VerdictView | None
    """null: no trial may win (yet)."""
    knobs: list[KnobColumn]
    constants: Plain
    """Knob -> value, for all other knobs."""
    columns: PointColumns
    outcomes: list[str]
    """Words by code; the next four are lists of the same kind. They only grow."""
    purposes: list[str]
    fidelities: list[str]
    causes: list[str]
    nodes: list[str]
