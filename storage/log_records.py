"""Rows of what ranks print and do, as values."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """What the ranks of a running attempt did when they were heard last."""

    trial_number: int
    attempt: int
    """1, 2, … within the trial."""
    phase: str
    step: int
    samples_per_second: float | None
    message: str
    time: datetime


LOG_HEAD_BYTES, LOG_TAIL_BYTES = 65_536, 262_144
"""How much is kept of the beginning and of the end of what the ranks of one attempt print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """A part of what one rank of a trial printed; it may begin and end within a line."""

    sequence: int
    """Grows over all attempts of the trial; where it jumps, parts were left out."""
    attempt: int
    """1, 2, … within the trial."""
    rank: int
    time: datetime
    """When it was written down."""
    start: int
    """Bytes that the attempt had printed before it, on all ranks, what was left out included."""
    size: int
    """Its own bytes, as UTF-8."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNews:
    """What is new of a trial's output."""

    last: int
    """Sequence of its last part; 0: there is none."""
    over: bool
    """Whether nothing comes any more after these parts, unless the job goes on."""
    parts: tuple[LogRecord, ...]
