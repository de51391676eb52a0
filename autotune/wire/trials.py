"""Trials of a job: one by one with their attempts, and as columns for plots, where words and knob values are codes."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autotune.wire.jobs import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A queued, running or ended trial of a job."""

    number: int
    """0, 1, 2, … in the order of proposal. 0 is the baseline."""
    purpose: str
    """A `Purpose`: search, screen, confirm or control."""
    fidelity: str
    """full, fewer_micro_batches or fewer_layers."""
    repeat: int
    """0, 1, 2, … among the trials with the same configuration, purpose and fidelity."""
    counted: bool
    """Whether it counts against the budget of trials."""
    outcome: str | None
    """An `Outcome`: OK, INFEASIBLE, INVALID, WRONG, FAILED, TIMEOUT, LOST, PREEMPTED, PRUNED or CANCELLED. None: the trial is
    queued or running."""
    config: Mapping[str, Any]
    """Knob -> value."""
    attempts: int
    """Number of started attempts."""
    created: datetime
    started: datetime | None
    """When the accepted attempt started. None: there is none (yet). None with an outcome: the trial was refused before it used
    a device."""
    finished: datetime | None
    """None: the trial has no outcome."""
    result: Mapping[str, Any] | None
    """This single measurement (docs/measurement.md): `samples_per_second` with its interval, `peak_memory_bytes` of the highest
    rank, `step_seconds`, `message`, … Numbers that are not finite are None. None: there is no result. The estimate of the
    configuration, from all of its measurements, is in `decision.standings` of the best configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPage:
    """Trials by number."""

    items: tuple[Trial, ...]
    next: int | None
    """`cursor` of the next page. None: there is no next page at present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One execution of a trial."""

    trial: int
    """Number of the trial."""
    number: int
    """1, 2, … within the trial."""
    state: str
    """running, accepted, retried, superseded or abandoned."""
    outcome: str | None
    """An `Outcome`. None: the attempt has no result."""
    started: datetime
    finished: datetime | None
    """When the result came. None: the attempt is running, or no result came."""
    result: Mapping[str, Any] | None
    """As for a `Trial`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptList:
    """The attempts of a trial, oldest first."""

    items: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobColumn:
    """A knob that is searched or has several values. If it appears later, all earlier trials had its first value."""

    name: str
    """Name of the knob."""
    unit: str
    """Unit of the values. Empty: they have none."""
    values: tuple[Any, ...]
    """Values by code, in the order of their first use. They only grow."""
    codes: tuple[int, ...]
    """A code for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointColumns:
    """Each column has one value per row. None: no value (yet)."""

    number: tuple[int, ...]
    """Numbers of the trials."""
    outcome: tuple[int | None, ...]
    """Codes of words in `outcomes`. None: queued or running."""
    purpose: tuple[int, ...]
    """Codes of words in `purposes`."""
    fidelity: tuple[int, ...]
    """Codes of words in `fidelities`."""
    repeat: tuple[int, ...]
    """0, 1, 2, … among the trials with the same configuration, purpose and fidelity."""
    attempts: tuple[int, ...]
    """Number of started attempts. 0: the trial waits."""
    eligible: tuple[int, ...]
    """1: the trial may win, because it is measured, stable, and within the capacity. 0: it may not."""
    cause: tuple[int | None, ...]
    """Codes of words in `causes`: the rule, or the row of the failure table, that determined the outcome."""
    rate: tuple[float | None, ...]
    """Samples/s of this single measurement; `low` and `high` are its 95 % interval. The estimate of a configuration, from all
    of its measurements, is in `best.standings`; a configuration without one has this measurement only."""
    low: tuple[float | None, ...]
    """Lower bound of the rate."""
    high: tuple[float | None, ...]
    """Upper bound of the rate. For a pruned trial it is the bound that the trial could not exceed."""
    peak: tuple[int | None, ...]
    """Peak memory of the highest rank, in bytes."""
    predicted_rate: tuple[float | None, ...]
    """Samples/s as predicted before the job's first trial."""
    predicted_peak: tuple[int | None, ...]
    """Peak memory in bytes as predicted before the job's first trial."""
    started: tuple[float | None, ...]
    """Seconds after `epoch` at which the running attempt started, or the one whose result counts."""
    finished: tuple[float | None, ...]
    """Seconds after `epoch`."""
    node: tuple[int | None, ...]
    """Codes of words in `nodes`: the node of the first rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """A job's trials as columns: all trials, or the changed ones, which replace the rows with their numbers."""

    job: str
    """The job's id."""
    state: str
    """The job's state."""
    version: int
    """`since` of the next request."""
    whole: bool
    """Whether all trials are given. Then the client must discard its rows."""
    count: int
    """Number of trials of the job. A client with fewer rows after this response must request all trials."""
    epoch: datetime
    """When the job was created."""
    objective: str
    """throughput, memory or pareto."""
    limit_bytes: int | None
    """Memory limit of a rank. None: it is not known."""
    capacity_bytes: int | None
    """The limit less the headroom. A configuration that needs more cannot win. None: the limit is not known."""
    calibration_source: str | None
    """The source of the predictions, in words. None: there are no predictions for this model."""
    seconds_left: float | None
    """Upper estimate from the job's pace, with controls and confirmations. None: the job has ended, or no trial has."""
    front: tuple[int, ...]
    """Numbers of the trials on the Pareto front of samples/s and memory, fastest first."""
    best: Verdict | None
    """None: no trial may win (yet)."""
    knobs: tuple[KnobColumn, ...]
    """The knobs that are searched or have several values."""
    constants: Mapping[str, Any]
    """Knob -> value, for all other knobs."""
    columns: PointColumns
    """The rows."""
    outcomes: tuple[str, ...]
    """Words by code. They only grow, as do the next four."""
    purposes: tuple[str, ...]
    """Words by code."""
    fidelities: tuple[str, ...]
    """Words by code."""
    causes: tuple[str, ...]
    """Words by code."""
    nodes: tuple[str, ...]
    """Words by code."""
