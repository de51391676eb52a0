"""Records that the database keeps and the service sends as they are: what a job reports, tries of deliveries, audit entries.

They are here because clients of the service, which must not load the storage, use them too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from search_spaces.outcome import JobState

LOG_HEAD_BYTES, LOG_TAIL_BYTES = 65_536, 262_144
"""How many bytes are kept from the beginning and from the end of the output of one attempt's ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
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
class JobNews:
    """The state of a job, and its new events."""

    state: JobState
    version: int
    """The sequence of its last event."""
    events: tuple[JobEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptProgress:
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
class LogNews:
    """New output of a trial."""

    last: int
    """Sequence of the trial's last part; 0: there is none."""
    over: bool
    """Whether these parts are the last ones, unless the job continues."""
    parts: tuple[LogPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryTry:
    """One request to a receiver."""

    time: datetime
    seconds: float
    """Duration of the request."""
    status: int | None
    """Status code of the receiver. None: it did not answer."""
    error: str
    """Why the request failed. Empty: it did not fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An entry of the audit log."""

    id: str
    time: datetime
    actor: str
    """Owner of the key, or the user of the machine on which a command ran. Empty: a user of the server's machine, if the server
    requires no keys."""
    key: str | None
    """Id of the key. None: a command on the database, or a request without a key."""
    source: str
    """Client address of the request, or machine of the command."""
    action: str
    """What was done, such as key.create."""
    target: str
    """Id of the affected object. Empty: the whole database."""
    detail: Mapping[str, Any]
    """Details, depending on the action."""
