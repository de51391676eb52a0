"""What a run remembers for the next one of the same script on the same machine."""

import contextlib
import hashlib
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.output import write_whole
from search_spaces.knob import Value
from search_spaces.plain import from_plain, to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What must be the same for a setting to count again."""

    script: str
    parameters: int
    """Number of the model's parameters, and with `model` all that is compared of it."""
    model: str
    global_batch_size: int
    world_size: int
    device: str
    host: str = field(default_factory=socket.gethostname)
    arguments: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    """The program and its arguments, as the run was started; they may differ."""

    @property
    def key(self) -> str:
        """16 hexadecimal digits."""
        text = json.dumps([getattr(self, name) for name in self.__slots__ if name != "arguments"])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The answer of an earlier run."""

    setting: Mapping[str, Value]
    step_seconds: float
    too_large: tuple[Mapping[str, Value], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitedSetting:
    """What a run knows of one of its settings."""

    values: Mapping[str, Value]
    step_seconds: Sequence[float]
    """Empty: it ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run whose search is over."""

    run: RunIdentity
    answer: Remembered
    visited: tuple[VisitedSetting, ...]
    """The first one is what the run began with."""
    journal: str
    """A line for each decision."""


class RunMemory:
    """A JSON file with the answer of each identity. Without a file nothing is remembered."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self, identity: RunIdentity) -> Remembered | None:
        """The answer of an earlier run; None: there is none, or it cannot be read."""
        record = self.records().get(identity.key)
        return None if record is None else record.answer

    def records(self) -> dict[str, RunRecord]:
        """The newest record of each identity, by its key; those that cannot be read are left out."""
        records: dict[str, RunRecord] = {}
        for key, entry in self._entries().items():
            with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):
                records[key] = from_plain(RunRecord, entry)
        return records

    def write(self, *records: RunRecord) -> None:
        """Replace the records of these identities."""
        if self._path is not None:
            entries = self._entries() | {record.run.key: to_plain(record) for record in records}
            write_whole(self._path, json.dumps(entries, indent=1) + "\n")

    def _entries(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8")) if self._path is not None else {}
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}
