"""Outcomes of trials and states of jobs."""

from enum import StrEnum


class Outcome(StrEnum):
    """Outcome of an attempt at a trial. The values are stored and exported: never rename one."""

    OK = "OK"
    """Measured."""
    INFEASIBLE = "INFEASIBLE"
    """Out of memory, established by the device's allocator or by the stated limit per rank. Not retried."""
    INVALID = "INVALID"
    """The engine or a rule refuses this combination; the rule's name is recorded. Not retried."""
    WRONG = "WRONG"
    """Loss or gradient norm not finite, or different from the job's reference on the same seed and data. Never wins."""
    FAILED = "FAILED"
    """A deterministic error, recorded with its traceback. Not retried."""
    TIMEOUT = "TIMEOUT"
    """Exceeded its time limit; every rank was killed. Retried once."""
    LOST = "LOST"
    """The worker or its node is gone. Retried, up to a limit."""
    PREEMPTED = "PREEMPTED"
    """The scheduler took the devices. Retried without counting as an attempt."""
    PRUNED = "PRUNED"
    """Stopped early because it could no longer beat the best; its bound is recorded. Not retried."""
    CANCELLED = "CANCELLED"
    """Stopped by a user. Not retried."""


RETRIES: dict[Outcome, int] = {Outcome.TIMEOUT: 1, Outcome.LOST: 3, Outcome.PREEMPTED: 1_000}
"""Further attempts after an outcome that no row of the failure table assigned; for other outcomes none."""


class JobState(StrEnum):
    """State of a job. The values are stored and exported: never rename one."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    """Running trials finish, no new ones start."""
    CANCELLING = "CANCELLING"
    """Running trials are killed."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class StopReason(StrEnum):
    """Why a job succeeded."""

    BUDGET = "BUDGET"
    """The budget of trials or seconds is used up."""
    CONVERGED = "CONVERGED"
    """An untried configuration is sufficiently unlikely to win."""
    EXHAUSTED = "EXHAUSTED"
    """Every legal configuration was tried."""
    FOUND = "FOUND"
    """The requested one configuration that may win was found."""
    NOTHING_FEASIBLE = "NOTHING_FEASIBLE"
    """No tried configuration fits."""
    STOPPED = "STOPPED"
    """A user stopped the job and keeps the best so far."""


class Purpose(StrEnum):
    """Purpose of a trial."""

    SEARCH = "search"
    """Counts against the trial budget once it starts on a device."""
    SCREEN = "screen"
    """A cheap measurement at reduced fidelity."""
    CONFIRM = "confirm"
    """A repeat of a finalist, interleaved with its rival. Recorded, does not count."""
    CONTROL = "control"
    """A repeat of the baseline between search trials, to detect drift of the machine. Recorded, does not count."""
