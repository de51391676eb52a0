"""What another framework's file says in our words, and how it is taken apart."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import RequestError
from autotune.exports.winner import Stated
from search_spaces.errors import KnobValueError
from search_spaces.knobs import KNOBS, check_value, parse_value, value_text
from search_spaces.trial_config import Value

AUTO = "auto"
"""What Hugging Face's integration fills in when a run begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration from elsewhere."""

    knobs: Mapping[str, Value]
    global_batch_size: int | None = None
    """None: the file does not say it."""
    samples_per_rank: int | None = None
    """Samples of a data-parallel rank in an optimizer step; None: the file does not say it."""
    ranks: int | None = None
    """Processes that the file is written for; None: it does not say."""
    engine: str | None = None
    """The engine of ours that measured it; None: none did."""
    stated: Stated = field(default_factory=Stated)
    """Hyperparameters that the file has."""
    notes: tuple[str, ...] = ()
    """What was not read as a knob, one line each."""


class Table:
    """A file's tables, flat: `zero_optimization.stage`. What is read is taken away; what is left is told."""

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.notes: list[str] = []
        self.knobs: dict[str, Value] = {}
        self._left = dict(_flat(content, ""))

    def take(self, key: str) -> Any:
        """The value under the key, once; None: there is none, or it is null or auto."""
        value = self._left.pop(key, None)
        if value == AUTO:
            self.notes.append(f"{key}=auto: is filled in when a run begins; it was left at the default")
            return None
        return value

    def whole(self, key: str) -> int | None:
        """A count of at least 1.

        Raises:
            RequestError: it is something else.
        """
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
            raise RequestError(key, f"{value!r} in {self.source} is no count", "give a whole number of at least 1")
        return int(value)

    def number(self, *keys: str, default: float) -> float:
        """As `quantity`, and the default where there is none."""
        found = self.quantity(*keys)
        return default if found is None else found

    def quantity(self, *keys: str) -> float | None:
        """A number of at least 0 under the first of the keys that is there; None: there is none.

        Raises:
            RequestError: it is something else.
        """
        for key in keys:
            value = self.take(key)
            if value is None:
                continue
            try:
                number = math.nan if isinstance(value, bool) else float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not 0 <= number < math.inf:
                raise RequestError(key, f"{value!r} in {self.source} is no number", "give a number of at least 0")
            return number
        return None

    def switch(self, key: str) -> bool | None:
        """True or false.

        Raises:
            RequestError: it is something else.
        """
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise RequestError(key, f"{value!r} in {self.source} is no switch", "give true or false")

    def choice(self, key: str, meanings: Mapping[str, Value]) -> Value | None:
        """What the word under the key means.

        Raises:
            RequestError: it is none of these words.
        """
        value = self.take(key)
        if value is None:
            return None
        word = str(value).lower()
        if word not in meanings:
            raise RequestError(key, f"{value!r} in {self.source} is not known", f"use one of {', '.join(meanings)}")
        return meanings[word]

    def knob(self, key: str, name: str) -> None:
        """Read a knob that has the same values in the file.

        Raises:
            RequestError: the value is not in the knob's domain.
        """
        value = self.take(key)
        if value is None:
            return
        try:
            # YAML reads 5e8 as text.
            self.knobs[name] = parse_value(name, value) if isinstance(value, str) else check_value(name, value)
        except KnobValueError as error:
            raise RequestError(key, f"{value!r} in {self.source} is not in the domain of {name}", error.remedy) from error

    def set(self, name: str, value: Value | None) -> None:
        """State a knob; None: the file does not say it."""
        if value is not None:
            self.knobs[name] = check_value(name, value)

    def drop(self, *keys: str) -> None:
        """Take keys away that say nothing more."""
        for key in keys:
            self._left.pop(key, None)

    def imported(self, **fields: Any) -> Imported:
        """What was read; everything that is left gets its note."""
        for key, value in self._left.items():
            why = "is filled in when a run begins" if value == AUTO else "is no knob here; trials do without it"
            self.notes.append(f"{key}={_text(value)}: {why}")
        knobs = {name: self.knobs[name] for name in KNOBS if name in self.knobs}
        return Imported(knobs=knobs, notes=tuple(self.notes), **fields)


def _flat(content: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _text(value: object) -> str:
    text = value_text(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
