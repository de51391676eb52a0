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

from executor.measurement.timing import has_trend
from executor.measurement.trial_report import Trial, is_enough
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
    sequence_length: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStep:
    """One optimizer step, or the equivalent number of samples."""

    seconds: float
    waited: float | None
    """Part of `seconds` that it waited for data; None: not reported."""


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
        timing = self._seconds(row)
        if timing is None:
            return None
        seconds, scale = timing
        self.count += 1
        if seconds is None:
            return None
        waited = row.get("waited")
        return ReportedStep(seconds=seconds, waited=None if waited is None else min(waited * scale, seconds))

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
        if seconds := _step_seconds(row):
            scale = batch.samples / (self.samples or self.observed_samples or batch.script_samples)
            return seconds * scale, scale
        if self.samples is None or not reports_samples or "clock" not in row:
            return None
        now, before = row["clock"], self._before
        self._before = now
        scale = batch.samples / self.samples
        return (None if before is None else max(now - before, 1e-9) * scale), scale

    def _take_loss(self, loss: float) -> None:
        self.losses.append(loss)
        if not math.isfinite(loss) and not self.not_finite:
            remedy = "lower the script's learning rate or use a wider precision in it"
            self.not_finite = f"loss is {loss} at report {len(self.losses) - 1}; {remedy}"


def _step_seconds(row: Mapping[str, float]) -> float | None:
    """Seconds of a step of the script; None: the row does not report them."""
    if "steps_per_second" in row:
        return 1.0 / row["steps_per_second"]
    return row.get("step_seconds", row["step_milliseconds"] / 1e3 if "step_milliseconds" in row else None)


_NUMBERS = frozenset({
    "samples", "tokens", "clock", "samples_per_second", "tokens_per_second", "tokens_per_second_per_device",
    "step_seconds", "step_milliseconds", "steps_per_second", "loss", "waited", "device_bytes", "reserved_bytes",
})  # fmt: skip
_POSITIVE = _NUMBERS - {"loss", "clock", "waited", "device_bytes", "reserved_bytes"}


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


FEWEST_TIMED = 2
"""Minimum number of steps for an interval."""


class ReportedSteps:
    """Takes steps in order. The rules are those for steps of the other engines (`executor.trial.run`)."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._warm: list[ReportedStep] = []
        self._timed: list[ReportedStep] = []
        self.settled = False
        self.measuring = False
        self.enough = False
        self.hopeless = False
        """Whether the warm-up already showed that the trial cannot win."""

    @property
    def warm_seconds(self) -> list[float]:
        """Duration of every warm-up step."""
        return [step.seconds for step in self._warm]

    @property
    def latest_rate(self) -> float:
        """Samples/s of the last step; 0: no step yet."""
        last = (self._timed or self._warm)[-1:]
        return self._trial.request.workload.global_batch_size / last[0].seconds if last else 0.0

    def add(self, step: ReportedStep) -> None:
        """Add one step. Steps are ignored once there are enough."""
        if self.enough:
            return
        if self.measuring:
            self._timed.append(step)
            seconds = [timed.seconds for timed in self._timed]
            most = self._trial.request.fidelity.max_steps
            self.enough = len(seconds) >= most or is_enough(self._trial, seconds, sum(seconds))
            return
        self._warm.append(step)
        fidelity, race = self._trial.request.fidelity, self._trial.race
        self.settled = not has_trend(self.warm_seconds[fidelity.warmup_updates :])
        self.measuring = self.settled or len(self._warm) >= fidelity.max_warmup_steps
        self.enough = self.hopeless = race is not None and race.is_hopeless(self.warm_seconds)

    def timed(self) -> list[ReportedStep]:
        """The timed steps. If the script ended before there were enough: the later half of all steps, marked as not settled."""
        if len(self._timed) >= FEWEST_TIMED:
            return self._timed
        every = [*self._warm, *self._timed]
        self.settled = False
        return every[len(every) // 2 :]
