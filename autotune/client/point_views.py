"""A job's trials as columns, for plots."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autotune.client.decoding import Plain
from autotune.client.plan_views import PredictedInterval


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobColumn:
    """A knob that is searched, or has several values."""

    name: str
    unit: str
    values: tuple[Any, ...]
    """By code, in the order in which trials had them first."""
    codes: tuple[int, ...]
    """A code for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The best over the baseline: a ratio with its 95 % interval."""

    of: str
    """samples_per_second, or peak_memory_bytes where memory is the objective."""
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A configuration that may be the answer, or the baseline."""

    trial: int
    rate: PredictedInterval
    """Samples/s with the 95 % interval, from all that was measured of the configuration."""
    repeats: int
    """Measurements that the rate rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a job has found so far, by number of trial."""

    keeps_baseline: bool
    """Whether the answer is to keep the baseline: nothing that was tried is known to be better."""
    trial: int
    """The answer."""
    rate: PredictedInterval
    """Its samples/s with the 95 % interval, from all that was measured of its configuration."""
    baseline: int | None
    baseline_rate: PredictedInterval | None
    gain: Gain | None
    runner_up: int | None
    runner_up_ratio: PredictedInterval | None
    """The runner-up's samples/s over the answer's."""
    tie: bool
    """Whether the measurements do not separate the two."""
    probability_best: float
    """Probability that no configuration that was tried is better than the answer."""
    expected_loss: float
    """Share of the best tried configuration's rate that the answer is expected to lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Answer):
    """The same, with how all that may be the answer stand."""

    standings: tuple[Standing, ...]
    """Every contender: the answer, then by rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointColumns:
    """A value for each row in each of them; None: there is none (yet)."""

    number: tuple[int, ...]
    outcome: tuple[int | None, ...]
    """Code of a word in `outcomes`; None: wanted or running."""
    purpose: tuple[int, ...]
    fidelity: tuple[int, ...]
    repeat: tuple[int, ...]
    attempts: tuple[int, ...]
    """Attempts started; 0: it waits."""
    eligible: tuple[int, ...]
    """1: it may win: measured, stable, and within the capacity."""
    cause: tuple[int | None, ...]
    """Code of the rule, or of the row of the failure table, that told the outcome."""
    rate: tuple[float | None, ...]
    """Samples/s, and its 95 % interval."""
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    peak: tuple[int | None, ...]
    """Bytes of the highest rank."""
    predicted_rate: tuple[float | None, ...]
    """Samples/s, as was predicted before the job's first trial."""
    predicted_peak: tuple[int | None, ...]
    started: tuple[float | None, ...]
    """Seconds after `epoch`."""
    finished: tuple[float | None, ...]
    node: tuple[int | None, ...]
    """Code of the first rank's node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Every trial, or those that changed, which take the place of the rows of their numbers."""

    job: str
    state: str
    version: int
    """`since` of the next call."""
    whole: bool
    """Whether every trial is given."""
    count: int
    """Trials that there are."""
    epoch: datetime
    """When the job was created."""
    objective: str
    limit_bytes: int | None
    """Bytes that a rank may have; None: not known."""
    capacity_bytes: int | None
    """The same less the headroom: more than that does not win."""
    rests_on: str | None
    """In words, what the predictions rest on; None: nothing is predicted of such a model."""
    seconds_left: float | None
    """At most, at the job's own pace, controls and confirmations included; None: it does not go on, or no trial has ended."""
    front: tuple[int, ...]
    """Numbers of the trials that none beats in samples/s and memory at once, fastest first."""
    best: Verdict | None
    """None: nothing may win (yet)."""
    knobs: tuple[KnobColumn, ...]
    constants: Plain
    """Knob -> value, of all others."""
    columns: PointColumns
    outcomes: tuple[str, ...]
    """Words by code, as in the next four."""
    purposes: tuple[str, ...]
    fidelities: tuple[str, ...]
    causes: tuple[str, ...]
    nodes: tuple[str, ...]
