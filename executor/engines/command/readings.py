"""What one rank's script told of its steps."""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_spaces.patterns import compiled

TAIL_BYTES = 32_768
"""How much of the end of a script's output is kept."""
LARGEST_OUTPUT = 16 * 2**20
"""Bytes of output after which the file is emptied: what was read is not needed any more."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step of the job's workload is, for rates that are told by samples or tokens."""

    samples: int
    """In a step, over all ranks."""
    sequence_length: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTold:
    """One optimizer step, or as many samples as are in one."""

    seconds: float
    waited: float | None
    """Seconds of them that it waited for data; None: it does not tell."""


@dataclass(slots=True)
class Readings:
    """Turns what a script reports into steps. Rows come in their order."""

    batch: Batch
    count: int = 0
    """Rows that told how fast the script is."""
    losses: list[float] = field(default_factory=list)
    not_finite: str = ""
    """The first loss that is no number, in words; empty: none."""
    problem: str = ""
    """Why a row cannot be used; empty: all could."""
    samples: float | None = None
    """Of a report, as told last."""
    device_bytes: int | None = None
    """Peak of the device's allocator, as told by the script's own torch."""
    reserved_bytes: int | None = None
    _before: float | None = None
    """When the last report was made."""

    def take(self, row: Mapping[str, Any]) -> StepTold | None:
        """Take one row; returns the step that it tells, None where it tells none (the first report, a loss alone)."""
        try:
            return self._take({name: _number(name, value) for name, value in row.items() if name in _NUMBERS})
        except ValueError as error:
            self.problem = self.problem or str(error)
            return None

    def _take(self, row: Mapping[str, float]) -> StepTold | None:
        if "loss" in row:
            self._take_loss(row["loss"])
        for name in ("device_bytes", "reserved_bytes"):
            if name in row:
                setattr(self, name, max(int(row[name]), getattr(self, name) or 0))
        told = self._seconds(row)
        if told is None:
            return None
        seconds, share = told
        self.count += 1
        if seconds is None:
            return None
        waited = row.get("waited")
        return StepTold(seconds=seconds, waited=None if waited is None else min(waited * share, seconds))

    def _seconds(self, row: Mapping[str, float]) -> tuple[float | None, float] | None:
        """Seconds for as many samples as a step has (None: a first report), and what the row's own seconds are multiplied by.

        None: the row tells nothing of time.
        """
        batch = self.batch
        tokens = batch.samples * batch.sequence_length
        if rate := row.get("samples_per_second"):
            return batch.samples / rate, 1.0
        if rate := row.get("tokens_per_second"):
            return tokens / rate, 1.0
        if rate := row.get("tokens_per_second_per_device"):
            return tokens / (rate * batch.world_size), 1.0
        if seconds := row.get("step_seconds", row.get("step_milliseconds", 0.0) / 1e3):
            return seconds, 1.0
        if "samples" not in row:
            return None
        self.samples = row["samples"]
        now, before = row["clock"], self._before
        self._before = now
        share = batch.samples / self.samples
        return (None if before is None else max(now - before, 1e-9) * share), share

    def _take_loss(self, loss: float) -> None:
        self.losses.append(loss)
        if not math.isfinite(loss) and not self.not_finite:
            remedy = "lower the script's learning rate or use a wider precision in it"
            self.not_finite = f"loss is {loss} at report {len(self.losses) - 1}; {remedy}"


_NUMBERS = frozenset({
    "samples", "clock", "samples_per_second", "tokens_per_second", "tokens_per_second_per_device", "step_seconds",
    "step_milliseconds", "loss", "waited", "device_bytes", "reserved_bytes",
})  # fmt: skip
_POSITIVE = _NUMBERS - {"loss", "clock", "waited", "device_bytes", "reserved_bytes"}
_NOT_NEGATIVE = _NUMBERS - _POSITIVE - {"loss"}


def _number(name: str, value: Any) -> float:
    """`1,234.5` too: logs are for people."""
    try:
        number = float(value.replace(",", "") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is reported as {value!r}, which is no number") from None
    if name in _POSITIVE and not 0 < number < math.inf:
        raise ValueError(f"{name} is reported as {value!r}, which is not above 0")
    if name in _NOT_NEGATIVE and not 0 <= number < math.inf:
        raise ValueError(f"{name} is reported as {value!r}, which is not 0 or above")
    return number


class ReportFile:
    """The JSON lines that a script appends."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Those that were completed since the last call."""
        new = _read_on(self._path, self._at)
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # of a script that writes the file itself
            if isinstance(row, dict):
                yield {"clock": time.monotonic(), **row}  # of a script that does not tell when: now


class Output:
    """The output of a script: its end, and what a pattern finds in it."""

    def __init__(self, path: Path, pattern: str | None) -> None:
        self._path, self._at = path, 0
        self._pattern = None if pattern is None else compiled(pattern)
        self._kept = b""
        self._unfinished = b""
        self.length = 0
        """Bytes so far."""

    @property
    def tail(self) -> str:
        """The end of it, without colours."""
        return _COLOURS.sub("", self._kept.decode(errors="replace")).strip()

    def rows(self) -> list[dict[str, Any]]:
        """Read on; return what the pattern's groups found in new lines."""
        new = _read_on(self._path, self._at)
        _pass_on(new)
        self._at += len(new)
        self.length += len(new)
        if self._at > LARGEST_OUTPUT:
            with self._path.open("rb+") as file:
                file.truncate(0)  # the script appends: it goes on at the start
            self._at = 0
        self._kept = (self._kept + new)[-TAIL_BYTES:]
        if self._pattern is None:
            return []
        # Progress bars end their lines with a carriage return.
        *lines, self._unfinished = (self._unfinished + new).replace(b"\r", b"\n").split(b"\n")
        self._unfinished = self._unfinished[-TAIL_BYTES:]
        return [row for line in lines for row in self._found(line.decode(errors="replace"))]

    def _found(self, line: str) -> list[dict[str, Any]]:
        assert self._pattern is not None
        return list(self._pattern.readings(_COLOURS.sub("", line)))


def _pass_on(new: bytes) -> None:
    """Print it as the rank's own: what ranks print is kept with their trial."""
    with contextlib.suppress(OSError):  # nobody holds the other end any more
        while new:
            new = new[os.write(1, new) :]


def _read_on(path: Path, at: int) -> bytes:
    """What the file has from there on; nothing where there is no file yet."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read()
    except FileNotFoundError:
        return b""
