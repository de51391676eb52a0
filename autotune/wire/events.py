"""What a job reports while it runs: events, progress, output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of a job."""

    sequence: int = field(metadata={"ge": 1})
    """1, 2, 3, … within the job, without gaps."""
    time: datetime
    kind: str
    """job_created, job_acquired, job_released, job_asked, job_changed, trial_added, trial_refused, attempt_started,
    attempt_finished, attempt_abandoned, reference_set, or a kind of a newer service."""
    payload: Mapping[str, Any]
    """Details, depending on the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Events in order."""

    items: tuple[Event, ...]
    next: int
    """`after` of the next page, which may still be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The last reported progress of a running attempt."""

    trial: int
    """Number of the trial."""
    attempt: int
    """1, 2, … within the trial."""
    phase: str
    """What the ranks do."""
    step: int
    """Number of finished optimizer steps."""
    samples_per_second: float | None
    """None: nothing was measured yet."""
    message: str
    """Further information. Empty: there is none."""
    time: datetime
    """When the ranks reported it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressList:
    """The running attempts of a job, by trial."""

    items: tuple[Progress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A part of the output of a trial's rank. It may begin and end within a line."""

    sequence: int = field(metadata={"ge": 1})
    """Increases over all attempts of the trial. It has gaps where parts were dropped."""
    attempt: int
    """1, 2, … within the trial."""
    rank: int
    time: datetime
    """When the part was recorded."""
    start: int
    """Bytes that all ranks of the attempt printed before it, dropped parts included."""
    size: int
    """Size of `text` in bytes, as UTF-8."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Parts in order."""

    items: tuple[LogPart, ...]
    next: int
    """`after` of the next page, which may still be empty."""
