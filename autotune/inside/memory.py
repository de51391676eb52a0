"""What a run remembers for the next one of the same script on the same machine."""

import hashlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.output import write_whole
from search_spaces.knob import Value


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

    @property
    def key(self) -> str:
        """16 hexadecimal digits."""
        text = json.dumps([getattr(self, name) for name in self.__slots__])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The answer of an earlier run."""

    setting: Mapping[str, Value]
    step_seconds: float
    too_large: tuple[Mapping[str, Value], ...] = ()


class RunMemory:
    """A JSON file with the answer of each identity. Without a file nothing is remembered."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self, identity: RunIdentity) -> Remembered | None:
        """The answer of an earlier run; None: there is none, or it cannot be read."""
        entry = self._entries().get(identity.key)
        try:
            return None if entry is None else Remembered(**{name: entry[name] for name in Remembered.__slots__})
        except (KeyError, TypeError):
            return None

    def write(self, identity: RunIdentity, answer: Remembered) -> None:
        """Replace the answer of an identity."""
        if self._path is None:
            return
        entry = {name: getattr(answer, name) for name in Remembered.__slots__}
        about = {name: getattr(identity, name) for name in RunIdentity.__slots__}
        entries = self._entries() | {identity.key: {**entry, "run": about}}
        write_whole(self._path, json.dumps(entries, indent=2) + "\n")

    def _entries(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8")) if self._path is not None else {}
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}
