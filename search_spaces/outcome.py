"""How a trial ended, and what a job is doing."""

from enum import StrEnum


class Outcome(StrEnum):
    """How an attempt at a trial ended. The values are stored and exported: never rename one."""

    OK = "OK"
    """Measured."""
    INFEASIBLE = "INFEASIBLE"
    """Out of memory, proved by the device's allocator or by the stated limit per rank. Not retried."""
    INVALID = "INVALID"
    """The engine or a rule refuses this combination; the rule's name is kept. Not retried."""
    WRONG = "WRONG"
    """Loss or gradient norm not finite, or off the job's reference on the same seed and data. Never wins."""
    FAILED = "FAILED"
    """A deterministic error, kept with its traceback. Not retried."""
    TIMEOUT = "TIMEOUT"
    """Ran past its limit; every rank was killed. Retried once."""
    LOST = "LOST"
    """The worker or its node is gone. Retried, up to a limit."""
    PREEMPTED = "PREEMPTED"
    """The scheduler took the devices. Retried, free of charge."""
    PRUNED = "PRUNED"
    """Stopped early because it could no longer beat the best; its bound is kept. Not retried."""
    CANCELLED = "CANCELLED"
    """Stopped by a person. Not retried."""


RETRIES: dict[Outcome, int] = {Outcome.TIMEOUT: 1, Outcome.LOST: 3, Outcome.PREEMPTED: 1_000}
"""How many further attempts a trial gets after an outcome that no row of the failure table tells; after others none."""


class JobState(StrEnum):
    """What a job is doing. The values are stored and exported: never rename one."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    """Running trials end, no new one starts."""
    CANCELLING = "CANCELLING"
    """Running trials are killed."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class StopReason(StrEnum):
    """Why a job succeeded."""

    BUDGET = "BUDGET"
    """The trials or the seconds that were allowed are spent."""
    CONVERGED = "CONVERGED"
    """What is untried is unlikely enough to win."""
    EXHAUSTED = "EXHAUSTED"
    """Every legal configuration was tried."""
    FOUND = "FOUND"
    """One configuration that may win was asked for."""
    NOTHING_FEASIBLE = "NOTHING_FEASIBLE"
    """No configuration that was tried fits."""
    STOPPED = "STOPPED"
    """A person is content with the best so far."""


class Purpose(StrEnum):
    """Why a trial is wanted."""

    SEARCH = "search"
    """Counted against the budget of trials once it starts on a device."""
    SCREEN = "screen"
    """A cheap look at reduced fidelity."""
    CONFIRM = "confirm"
    """A repeat of a finalist, interleaved with its rival. Recorded, not counted."""
    CONTROL = "control"
    """A repeat of the baseline between search trials, which tells whether the machine drifts. Recorded, not counted."""
