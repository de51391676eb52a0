"""Resolve requests with a cache: a service receives the same few models and spaces repeatedly."""

import dataclasses
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from autotune.request.request import JobRequest
from autotune.session.resolve import require_workload, resolve
from search_spaces.models.huggingface import is_factory_reference
from search_spaces.models.model import ModelSpec
from search_spaces.plain import to_plain

KEPT = 256
"""Most cached requests; the one that was resolved longest ago is evicted first."""
KEPT_SECONDS = 60.0
"""How long a result is valid: `local` may then be a changed machine."""
INDEPENDENT = (
    "objective", "strategy", "seed", "trials", "max_seconds", "trial_timeout", "headroom", "runner", "confirm_repeats",
    "control_every", "fidelity", "allow_unstable", "loss_depends_on_batch", "racing", "stop_at_first", "name",
    "tags", "note",
)  # fmt: skip
"""Fields that do not affect the resolved fields. The request itself checks them."""


@dataclass(frozen=True, slots=True)
class _ResolvedRequest:
    request: JobRequest
    until: float
    size: int
    """Approximate bytes of the request and its result, as JSON."""


class Resolver:
    """Resolves requests with a cache. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, _ResolvedRequest] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def known(self, request: JobRequest, model: ModelSpec | None = None) -> JobRequest | None:
        """Return the cached result of `resolved`; None: not cached. Refusals are never cached."""
        with self._lock:
            cached = self._known.get(_name(_text(request, model)))
        return None if cached is None or cached.until <= self._clock() else _filled(request, cached.request)

    def resolved(self, request: JobRequest, model: ModelSpec | None = None, most_steps: int | None = None) -> JobRequest:
        """Return the request with its resolved fields filled in, checked like `resolve`. Raises what `resolve` and
        `require_workload` raise.

        Args:
            request: the request.
            model: the model that `request.model` names, if that is not a preset.
            most_steps: most steps for counting the space.
        """
        cached = self.known(request, model)
        if cached is not None:
            return cached
        session = resolve(request, model, most_steps)
        require_workload(request, session)
        resolved_request = session.request
        if not is_factory_reference(request.model):  # a factory's code may change
            text = _text(request, model)
            size = len(text) + len(json.dumps(to_plain(resolved_request)))
            # Lookups run in an event loop.
            if size <= 40_000:
                self._keep(_name(text), _ResolvedRequest(resolved_request, self._clock() + KEPT_SECONDS, size))
        return resolved_request

    def _keep(self, name: bytes, entry: _ResolvedRequest) -> None:
        with self._lock:
            former = self._known.pop(name, None)
            self._known[name] = entry
            self._size += entry.size - (0 if former is None else former.size)
            while len(self._known) > KEPT or self._size > 8_000_000:
                self._size -= self._known.popitem(last=False)[1].size


def _filled(request: JobRequest, resolved_request: JobRequest) -> JobRequest:
    resolved_names = (item.name for item in dataclasses.fields(JobRequest) if item.name.startswith("resolved_"))
    names = (*resolved_names, *request.resolved_defaults)
    return dataclasses.replace(request, **{name: getattr(resolved_request, name) for name in names})


def _name(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _text(request: JobRequest, model: ModelSpec | None) -> str:
    """A cache key: equal for requests with the same resolved fields."""
    values = {item.name: getattr(request, item.name) for item in dataclasses.fields(request) if item.name not in INDEPENDENT}
    return json.dumps([to_plain(values), to_plain(model)], sort_keys=True)
