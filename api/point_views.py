"""What `GET /v1/jobs/{id}/points` answers with."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel

from api.prediction import IntervalView
from storage.records import JobRecord

Plain = dict[str, Any]


class KnobColumn(BaseModel):
    """A knob that is searched, or has several values. One that comes later had its first value in all trials before."""

    name: str
    unit: str
    values: list[Any]
    """By code, in the order in which trials had them first; it only grows."""
    codes: list[int]
    """A code for each row."""


class GainView(BaseModel):
    """The best over the baseline: a ratio, and between what it is nineteen times out of twenty."""

    of: str
    """samples_per_second, or peak_memory_bytes where memory is the objective."""
    mean: float
    low: float
    high: float


class StandingView(BaseModel):
    """A configuration that may be the answer, or the baseline."""

    trial: int
    rate: IntervalView
    """Samples/s, from all that was measured of the configuration; 95 %."""
    repeats: int
    """Measurements that the rate rests on."""


class AnswerView(BaseModel):
    """What the job has found so far, by number of trial."""

    keeps_baseline: bool
    """Whether the answer is to keep the baseline: nothing that was tried is known to be better."""
    trial: int
    """The answer."""
    rate: IntervalView
    """Its samples/s, from all that was measured of its configuration; 95 %."""
    baseline: int | None
    baseline_rate: IntervalView | None
    gain: GainView | None
    runner_up: int | None
    runner_up_ratio: IntervalView | None
    """The runner-up's samples/s over the answer's."""
    tie: bool
    """Whether the measurements do not separate the two."""
    probability_best: float
    """Probability that no configuration that was tried is better than the answer."""
    expected_loss: float
    """Share of the best tried configuration's rate that the answer is expected to lack."""


def answer_view(job: JobRecord) -> AnswerView | None:
    """A job's answer as it is shown; None where there is none, or it is damaged: lists show many jobs."""
    try:
        return None if job.answer is None else AnswerView(**job.answer)
    except (TypeError, ValueError):
        return None


class VerdictView(AnswerView):
    """The same, with how all that may be the answer stand."""

    standings: list[StandingView]
    """Every contender: the answer, then by rate."""


class PointColumns(BaseModel):
    """A value for each row in each of them; null: there is none (yet)."""

    number: list[int]
    outcome: list[int | None]
    """Code of a word in `outcomes`; null: wanted or running."""
    purpose: list[int]
    fidelity: list[int]
    repeat: list[int]
    attempts: list[int]
    """Attempts started; 0: it waits."""
    eligible: list[int]
    """1: it may win: measured, stable, and within the capacity."""
    cause: list[int | None]
    """Code of the rule, or of the row of the failure table, that told the outcome."""
    rate: list[float | None]
    """Samples/s, and its 95 % interval; of a pruned trial `high` is the bound that was not enough."""
    low: list[float | None]
    high: list[float | None]
    peak: list[int | None]
    """Bytes of the highest rank."""
    predicted_rate: list[float | None]
    """Samples/s, as was predicted before the job's first trial."""
    predicted_peak: list[int | None]
    started: list[float | None]
    """Seconds after `epoch`, of the attempt that runs or whose result counts."""
    finished: list[float | None]
    node: list[int | None]
    """Code of the first rank's node."""


class PointsView(BaseModel):
    """A job's trials as columns: every trial, or those that changed, which take the place of the rows of their numbers."""

    job: str
    state: str
    version: int
    """`since` of the next request."""
    whole: bool
    """Whether every trial is given, so that rows that are known are to be forgotten."""
    count: int
    """Trials that there are. Who has fewer rows after this answer asks for all of them."""
    epoch: datetime
    """When the job was created."""
    objective: str
    limit_bytes: int | None
    """Bytes that a rank may have; null: not known."""
    capacity_bytes: int | None
    """The same less the headroom: more than that does not win."""
    rests_on: str | None
    """In words, what the predictions rest on; null: nothing is predicted of such a model."""
    seconds_left: float | None
    """At most, at the job's own pace, controls and confirmations included; null: it does not go on, or no trial has ended."""
    front: list[int]
    """Numbers of the trials that none beats in samples/s and memory at once, fastest first."""
    best: VerdictView | None
    """null: nothing may win (yet)."""
    knobs: list[KnobColumn]
    constants: Plain
    """Knob -> value, of all others."""
    columns: PointColumns
    outcomes: list[str]
    """Words by code, as in the next four; they only grow."""
    purposes: list[str]
    fidelities: list[str]
    causes: list[str]
    nodes: list[str]
