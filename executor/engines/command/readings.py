"""Reads what one rank's script reports about its steps, and times them."""

import contextlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_spaces.patterns import compiled

TAIL_BYTES = 32_768
"""Bytes kept from the end of a script's output."""
LARGEST_OUTPUT = 16 * 2**20
"""Bytes of output after which the file is truncated, since everything in it has been read."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The size of a step of the job's workload, to which every report is converted."""

    samples: int
    """Samples in a step, over all ranks."""
    script_samples: float
    """Samples in a step of the script, as far as its command says (`samples_of_step`)."""
    micro_batch_samples: int
    """Samples of a micro-batch of every data-parallel rank."""
    sequence_length: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStep:
    """One optimizer step, or the equivalent number of samples."""

    seconds: float
    waited: float | None
    """Part of `seconds` that it waited for data; None: not reported."""
    samples: float | None = None
    """Samples for which its time was taken, before it was scaled to the job's batch; None: not observed."""


@dataclass(slots=True)
class Readings:
    """Converts a script's reports to steps. Rows arrive in order."""

    batch: Batch
    count: int = 0
    """Rows that reported the speed of the script."""
    losses: list[float] = field(default_factory=list)
    not_finite: str = ""
    """Message about the first loss that is not finite; empty: none."""
    problem: str = ""
    """Why a row is invalid; empty: all rows are valid."""
    samples: float | None = None
    """Samples of the last report, or of a step as the log states them."""
    reported_samples: Counter[float] = field(default_factory=Counter)
    """Samples of a report -> number of reports with as many."""
    reported_at: list[tuple[float, float]] = field(default_factory=list)
    """Time and samples of each report."""
    observed_samples: float | None = None
    """Samples of a step over all ranks, as the probe counts them; None: not known for certain."""
    device_bytes: int | None = None
    """Peak of the device's allocator, as reported by the script's own torch."""
    reserved_bytes: int | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """End and seconds of each time that the script leaves out of its steps (`autotune.paused`)."""
    log_seconds: float = 0.0
    """Sum of the times of steps or micro-batches in the log, without the first."""
    log_clock: float = 0.0
    """Seconds in which the lines with these times were printed."""
    _log_began: float | None = None
    _waited: float | None = None
    _before: float | None = None
    """Time of the last report."""

    def take(self, row: Mapping[str, Any]) -> ReportedStep | None:
        """Take one row; return the step that it reports, or None if it reports none (the first report, or only a loss)."""
        try:
            return self._take({name: _number(name, value) for name, value in row.items() if name in _NUMBERS})
        except ValueError as error:
            self.problem = self.problem or str(error)
            return None

    def _take(self, row: Mapping[str, float]) -> ReportedStep | None:
        if "loss" in row:
            self._take_loss(row["loss"])
        for name in ("device_bytes", "reserved_bytes"):
            if name in row:
                setattr(self, name, max(int(row[name]), getattr(self, name) or 0))
        if "waited" in row:
            self._waited = (self._waited or 0.0) + row["waited"]
        if "paused" in row:
            self.pauses.append((row["clock"], row["paused"]))
        timing = self._seconds(row)
        if timing is None:
            return None
        seconds, scale = timing
        self.count += 1
        waited = self.take_waited()
        if seconds is None:
            return None
        return ReportedStep(seconds=seconds, waited=None if waited is None else min(waited * scale, seconds))

    def take_waited(self) -> float | None:
        """Seconds for which the script waited for data since the last call; None: not reported."""
        waited, self._waited = self._waited, None
        return waited

    def _seconds(self, row: Mapping[str, float]) -> tuple[float | None, float] | None:
        """Seconds for the samples of one step (None: the first report), and the factor that scales the row's own seconds to it.

        None: the row reports no time.
        """
        batch = self.batch
        tokens = batch.samples * batch.sequence_length
        reports_samples = "samples" in row or "tokens" in row
        if reports_samples:
            self.samples = row["samples"] if "samples" in row else row["tokens"] / batch.sequence_length
            self.reported_samples[self.samples] += 1
            self.reported_at.append((row.get("clock", 0.0), self.samples))
        if rate := row.get("samples_per_second"):
            return batch.samples / rate, 1.0
        if rate := row.get("tokens_per_second"):
            return tokens / rate, 1.0
        if rate := row.get("tokens_per_second_per_device"):
            return tokens / (rate * batch.world_size), 1.0
        if seconds := row.get("micro_batch_seconds"):
            self._compare_with_clock(seconds)
            scale = batch.samples / batch.micro_batch_samples
            return seconds * scale, scale
        step_seconds = row.get("step_seconds", row.get("step_milliseconds", 0.0) / 1e3)
        if seconds := 1.0 / row["steps_per_second"] if "steps_per_second" in row else step_seconds:
            self._compare_with_clock(seconds)
            scale = batch.samples / (self.samples or self.observed_samples or batch.script_samples)
            return seconds * scale, scale
        if self.samples is None or not reports_samples or "clock" not in row:
            return None
        now, before = row["clock"], self._before
        self._before = now
        scale = batch.samples / self.samples
        left_out = sum(seconds for end, seconds in self.pauses if before is not None and before < end <= now)
        return (None if before is None else max(now - before - left_out, 1e-9) * scale), scale

    def _compare_with_clock(self, seconds: float) -> None:
        now = time.monotonic()
        if self._log_began is None:
            self._log_began = now
        else:
            self.log_seconds, self.log_clock = self.log_seconds + seconds, now - self._log_began

    def _take_loss(self, loss: float) -> None:
        self.losses.append(loss)
        if not math.isfinite(loss) and not self.not_finite:
            remedy = "lower the script's learning rate or use a wider precision in it"
            self.not_finite = f"loss is {loss} at report {len(self.losses) - 1}; {remedy}"


_NUMBERS = frozenset({
    "samples", "tokens", "clock", "samples_per_second", "tokens_per_second", "tokens_per_second_per_device",
    "micro_batch_seconds", "step_seconds", "step_milliseconds", "steps_per_second", "loss", "waited", "paused",
    "device_bytes", "reserved_bytes",
})  # fmt: skip
_POSITIVE = _NUMBERS - {"loss", "clock", "waited", "paused", "device_bytes", "reserved_bytes"}


def _number(name: str, value: Any) -> float:
    """Parse a number; `1,234.5` is accepted, since logs are written for people."""
    try:
        number = float(value.replace(",", "") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is reported as {value!r}, which is not a number") from None
    if name in _POSITIVE and not 0 < number < math.inf:
        raise ValueError(f"{name} is reported as {value!r}, which is not above 0")
    if name not in _POSITIVE | {"loss"} and not 0 <= number < math.inf:
        raise ValueError(f"{name} is reported as {value!r}, which is not 0 or above")
    return number


class ReportFile:
    """The JSON lines that a script appends to its report file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines that were completed since the last call."""
        new = _read_from(self._path, self._offset)
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the script writes the file itself
            if isinstance(row, dict):
                yield {"clock": time.monotonic(), **row}  # if the script reports no time, use now


class Output:
    """The output of a script: its tail, and the matches of a pattern in it."""

    def __init__(self, path: Path, pattern: str | None) -> None:
        self._path, self._offset = path, 0
        self._pattern = None if pattern is None else compiled(pattern)
        self._kept = b""
        self._unfinished = b""
        self.length = 0
        """Bytes so far."""

    @property
    def tail(self) -> str:
        """The end of the output, without colour codes."""
        return _COLOURS.sub("", self._kept.decode(errors="replace")).strip()

    def rows(self) -> list[dict[str, Any]]:
        """Read new output; return what the pattern's groups match in new lines."""
        new = _read_from(self._path, self._offset)
        _pass_on(new)
        self._offset += len(new)
        self.length += len(new)
        if self._offset > LARGEST_OUTPUT:
            with self._path.open("rb+") as file:
                file.truncate(0)  # the script appends, so it continues at the start
            self._offset = 0
        self._kept = (self._kept + new)[-TAIL_BYTES:]
        if self._pattern is None:
            return []
        # Progress bars end their lines with a carriage return.
        *lines, self._unfinished = (self._unfinished + new).replace(b"\r", b"\n").split(b"\n")
        self._unfinished = self._unfinished[-TAIL_BYTES:]
        plain = (_COLOURS.sub("", line.decode(errors="replace")) for line in lines)
        return [row for line in plain for row in self._pattern.readings(line)]


def _pass_on(new: bytes) -> None:
    """Print it as the rank's own output, which is kept with the trial."""
    with contextlib.suppress(OSError):  # the reader is gone
        while new:
            new = new[os.write(1, new) :]


def _read_from(path: Path, offset: int) -> bytes:
    """The file's content from `offset` on; empty if there is no file yet."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""
