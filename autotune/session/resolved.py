"""What requests name, resolved and remembered: a service is sent the same few models and spaces again and again."""

import dataclasses
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from autotune.request.request import JobRequest
from autotune.session.resolve import resolve
from search_spaces.huggingface import is_factory_reference
from search_spaces.model import ModelSpec
from search_spaces.plain import to_plain

KEPT = 256
"""Requests that are remembered; the one that was resolved longest ago is forgotten first."""
KEPT_BYTES = 8_000_000
"""Of all that is remembered, as JSON."""
LARGEST = 40_000
"""Bytes of a request that is remembered, with what it resolved to: who looks it up does so in an event loop."""
KEPT_SECONDS = 60.0
"""How long `local` is taken to be the machine that it was."""
INDEPENDENT = (
    "objective", "strategy", "seed", "trials", "max_seconds", "trial_timeout", "headroom", "runner", "confirm_repeats",
    "control_every", "fidelity", "allow_unstable", "racing", "stop_at_first", "name", "tags", "note",
)  # fmt: skip
"""Fields on which nothing that is resolved depends. The request itself checks them."""
RESOLVED = tuple(item.name for item in dataclasses.fields(JobRequest) if item.name.startswith("resolved_"))


@dataclass(frozen=True, slots=True)
class _Known:
    request: JobRequest
    until: float
    size: int
    """Bytes, about: of what was asked for and of what it resolved to, as JSON."""


class Resolver:
    """Resolves requests. May be used from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def known(self, request: JobRequest, model: ModelSpec | None = None) -> JobRequest | None:
        """What `resolved` returns, where that is known; it is never known that a request is refused."""
        with self._lock:
            known = self._known.get(_name(_text(request, model)))
        return None if known is None or known.until <= self._clock() else _filled(request, known.request)

    def resolved(self, request: JobRequest, model: ModelSpec | None = None, most_steps: int | None = None) -> JobRequest:
        """The request with its resolved fields filled in, checked as `resolve` checks it. Raises what that raises.

        Args:
            request: what was asked for.
            model: what `request.model` names, where that is no preset.
            most_steps: what counting the space may take.
        """
        known = self.known(request, model)
        if known is not None:
            return known
        found = resolve(request, model, most_steps).request
        if not is_factory_reference(request.model):  # whose code may change
            text = _text(request, model)
            size = len(text) + len(json.dumps(to_plain(found)))
            if size <= LARGEST:
                self._keep(_name(text), _Known(found, self._clock() + KEPT_SECONDS, size))
        return found

    def _keep(self, name: bytes, known: _Known) -> None:
        with self._lock:
            former = self._known.pop(name, None)
            self._known[name] = known
            self._size += known.size - (0 if former is None else former.size)
            while len(self._known) > KEPT or self._size > KEPT_BYTES:
                self._size -= self._known.popitem(last=False)[1].size


def _filled(request: JobRequest, known: JobRequest) -> JobRequest:
    return dataclasses.replace(request, **{name: getattr(known, name) for name in RESOLVED})


def _name(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _text(request: JobRequest, model: ModelSpec | None) -> str:
    """The same for requests that resolve to the same."""
    values = {item.name: getattr(request, item.name) for item in dataclasses.fields(request) if item.name not in INDEPENDENT}
    return json.dumps([to_plain(values), to_plain(model)], sort_keys=True)
