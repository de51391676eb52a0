"""Records of the output and progress of ranks."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """The last reported progress of a running attempt."""

    trial_number: int
    attempt: int
    """1, 2, … within the trial."""
    phase: str
    step: int
    samples_per_second: float | None
    message: str
    time: datetime


LOG_HEAD_BYTES, LOG_TAIL_BYTES = 65_536, 262_144
"""How many bytes are kept from the beginning and from the end of the output of one attempt's ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """A part of the output of one rank of a trial; it may begin and end within a line."""

    sequence: int
    """Increases over all attempts of the trial; a gap means that parts were left out."""
    attempt: int
    """1, 2, … within the trial."""
    rank: int
    time: datetime
    """When it was stored."""
    start: int
    """Bytes that all ranks of the attempt had printed before it, including bytes that were left out."""
    size: int
    """Its own bytes, as UTF-8."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNews:
    """New output of a trial."""

    last: int
    """Sequence of the trial's last part; 0: there is none."""
    over: bool
    """Whether these parts are the last ones, unless the job continues."""
    parts: tuple[LogRecord, ...]
