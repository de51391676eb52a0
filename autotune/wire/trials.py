"""Trials of a job, and their attempts."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


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
    """The measurement (docs/measurement.md): `samples_per_second` with its interval, `peak_memory_bytes` of the highest rank,
    `step_seconds`, `message`, … Numbers that are not finite are None. None: there is no result."""


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
