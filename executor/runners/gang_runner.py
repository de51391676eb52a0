"""A runner of one gang: trials run one after the other, further ones wait."""

import collections
import time

from executor.errors import RunnerError
from executor.runners.gang import Gang, Work
from executor.runners.runner import Event, Handle, Runner
from executor.runners.transport import Transport
from search_spaces.microbenchmark import MicrobenchmarkRequest, MicrobenchmarkResult
from search_spaces.model import Model
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult

POLL_SECONDS = 0.1
"""How soon a cancellation, which may come from a signal handler, is looked at."""


class GangRunner(Runner):
    """Feeds one gang from a queue."""

    def __init__(self, transport: Transport, gang: Gang) -> None:
        self._world_size = transport.world_size
        self._gang = gang
        self._waiting: collections.deque[Work] = collections.deque()
        self._cancelled: dict[Handle, str] = {}
        self._events: list[tuple[Handle, Event]] = []

    def warm_up(self, model: Model) -> None:
        """Start the processes of ranks that trials of this model will want soon, and do not wait for them.

        Raises:
            RunnerError: they cannot be started.
        """
        self._gang.warm_up(model)

    def submit(self, request: Work) -> Handle:
        """Queue the attempt; it starts at once where the gang is free. A micro-benchmark too: its result has rows."""
        if request.world_size == self._world_size:
            self._waiting.append(request)
            self._start_next()
        else:
            message = (
                f"the trial wants {request.world_size} ranks and this runner has {self._world_size}; start it with as many"
            )
            self._tell(TrialResult(attempt=request.attempt, outcome=Outcome.INVALID, rule="world_size", message=message))
        return request.attempt

    def events(self, timeout: float) -> list[tuple[Handle, Event]]:
        """Return what happened; see `Runner`."""
        until = time.monotonic() + timeout
        while True:
            self._apply_cancellations()
            self._start_next()
            if self._events or (left := until - time.monotonic()) <= 0:
                break
            if self._gang.attempt is None:
                time.sleep(min(left, POLL_SECONDS))
                continue
            for event in self._gang.poll(min(left, POLL_SECONDS)):
                self._events.append((event.attempt, event))
        told, self._events = self._events, []
        return told

    def cancel(self, handle: Handle, reason: str) -> None:
        """Ask for the end of an attempt. One assignment, so that any thread and any signal handler may call it."""
        self._cancelled[handle] = reason

    def measure(self, request: MicrobenchmarkRequest) -> MicrobenchmarkResult:
        """Run a micro-benchmark on the ranks and wait for it; for a runner that has nothing else to do, as `run`.

        Raises:
            RunnerError: ranks cannot be started, or the micro-benchmark failed on them.
        """
        handle = self.submit(request)
        while True:
            for of, event in self.events(1.0):
                if of != handle or not isinstance(event, TrialResult):
                    continue
                if isinstance(event, MicrobenchmarkResult):
                    return event
                trace = f"\n{event.traceback}" if event.traceback else ""
                raise RunnerError(f"the micro-benchmark ended {event.outcome}: {event.message}{trace}")

    def capacity(self) -> int:
        """1 where the gang is free and nothing waits for it."""
        return int(self._gang.attempt is None and not self._waiting)

    def close(self) -> None:
        """End every process; see `Runner`."""
        self._waiting.clear()
        self._gang.close()

    def _start_next(self) -> None:
        if self._gang.attempt is None and self._waiting:
            self._gang.start(self._waiting.popleft())

    def _apply_cancellations(self) -> None:
        while self._cancelled:
            handle, reason = self._cancelled.popitem()
            if self._gang.attempt == handle:
                self._tell(self._gang.end(Outcome.CANCELLED, reason))
            for request in [request for request in self._waiting if request.attempt == handle]:
                self._waiting.remove(request)
                self._tell(TrialResult(attempt=handle, outcome=Outcome.CANCELLED, message=reason))

    def _tell(self, result: TrialResult) -> None:
        self._events.append((result.attempt, result))
