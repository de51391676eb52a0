"""Runners of gangs: trials start in order as soon as a gang is free."""

import collections
import time
from abc import abstractmethod

from executor.errors import RunnerError
from executor.runners.gang import Gang, Work
from executor.runners.runner import Event, Handle, Runner
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest, MicrobenchmarkResult
from search_spaces.environment import ENVIRONMENT_RULE, variables_of
from search_spaces.errors import KnobValueError
from search_spaces.models.model import Model
from search_spaces.outcome import Outcome
from search_spaces.trial import NodeEvent, TrialRequest, TrialResult


class GangsRunner(Runner):
    """Runs queued trials on gangs, each of which runs one attempt at a time. A subclass has the gangs.

    Every attempt that `begin` has accepted gets one result, from `poll` or from `end`.

    Raises:
        RunnerError: ranks cannot be started or placed at all; from every method except `close`.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[Work] = collections.deque()
        self._cancelled: dict[Handle, str] = {}
        self._events: list[tuple[Handle, Event]] = []

    @abstractmethod
    def begin(self, request: Work) -> bool:
        """Accept the attempt if it can start now. One that can never start is accepted too, and `poll` returns its result."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """Return the new events, waiting up to `timeout` seconds for the first."""

    @abstractmethod
    def end(self, handle: Handle, outcome: Outcome, message: str) -> TrialResult | None:
        """Abort a running attempt. None: it is not running."""

    @abstractmethod
    def free_gangs(self) -> int:
        """Return how many further attempts would start at once."""

    @abstractmethod
    def warm_up(self, model: Model) -> None:
        """Start processes for coming trials of this model, without waiting for them."""

    def submit(self, request: Work) -> Handle:
        """Queue an attempt, which starts at once if a gang is free. Also accepts a micro-benchmark, whose result has rows."""
        if (refused := _refused(request)) is not None:
            self._emit(refused)
            return request.attempt
        self._waiting.append(request)
        self._start_waiting()
        return request.attempt

    def events(self, timeout: float) -> list[tuple[Handle, Event]]:
        """Return what happened; see `Runner`."""
        until = time.monotonic() + timeout
        while True:
            self._apply_cancellations()
            self._start_waiting()
            if self._events or (remaining := until - time.monotonic()) <= 0:
                break
            # Longest delay until a cancellation, which may come from a signal handler, is handled.
            for event in self.poll(min(remaining, 0.1)):
                self._emit(event)
        events, self._events = self._events, []
        return events

    def cancel(self, handle: Handle, reason: str) -> None:
        """Request the end of an attempt. A single assignment, so that any thread and any signal handler may call it."""
        self._cancelled[handle] = reason

    def measure(self, request: MicrobenchmarkRequest) -> MicrobenchmarkResult:
        """Run a micro-benchmark on the ranks and wait for it. Like `run`, only for a runner that is otherwise idle.

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
                # After a forced end, the stacks add nothing to the message.
                trace = f"\n{event.traceback}" if event.traceback and event.outcome is Outcome.FAILED else ""
                raise RunnerError(f"the micro-benchmark ended {event.outcome}: {event.message}{trace}")

    def capacity(self) -> int:
        """Number of further attempts that would start at once, after those that already wait."""
        return max(0, self.free_gangs() - len(self._waiting))

    def close(self) -> None:
        """Forget the waiting attempts. A subclass ends its processes."""
        self._waiting.clear()

    def _start_waiting(self) -> None:
        while self._waiting and self.begin(self._waiting[0]):
            self._waiting.popleft()

    def _apply_cancellations(self) -> None:
        while self._cancelled:
            handle, reason = self._cancelled.popitem()
            if ended := self.end(handle, Outcome.CANCELLED, reason):
                self._emit(ended)
            for request in [request for request in self._waiting if request.attempt == handle]:
                self._waiting.remove(request)
                self._emit(TrialResult(attempt=handle, outcome=Outcome.CANCELLED, message=reason))

    def _emit(self, event: Event) -> None:
        self._events.append(("" if isinstance(event, NodeEvent) else event.attempt, event))


def _refused(request: Work) -> TrialResult | None:
    """Refuse an `environment` that no process may be started with, whoever wrote the configuration; None: it is allowed."""
    try:
        variables_of(request.config.environment if isinstance(request, TrialRequest) else "")
    except KnobValueError as error:
        return TrialResult(attempt=request.attempt, outcome=Outcome.INVALID, rule=ENVIRONMENT_RULE, message=str(error))
    return None


class GangRunner(GangsRunner):
    """A runner with one gang, for trials of `world_size` ranks, one after the other; None: of any number."""

    def __init__(self, world_size: int | None, gang: Gang) -> None:
        super().__init__()
        self._world_size = world_size
        self._gang = gang
        self._refused: list[Event] = []

    def begin(self, request: Work) -> bool:
        """Accept the attempt if the gang is free; see `GangsRunner`."""
        if self._gang.attempt is not None:
            return False
        if self._world_size in (None, request.world_size):
            self._gang.start(request)
        else:
            problem = f"the trial needs {request.world_size} ranks, but this runner has {self._world_size}"
            message = f"{problem}; start it with as many"
            refused = TrialResult(attempt=request.attempt, outcome=Outcome.INVALID, rule="world_size", message=message)
            self._refused.append(refused)
        return True

    def poll(self, timeout: float) -> list[Event]:
        """Return the new events; see `GangsRunner`."""
        if self._refused:
            refused, self._refused = self._refused, []
            return refused
        if self._gang.attempt is None:
            time.sleep(timeout)
            return []
        return list(self._gang.poll(timeout))

    def end(self, handle: Handle, outcome: Outcome, message: str) -> TrialResult | None:
        """Abort the attempt if it is running; see `GangsRunner`."""
        return self._gang.end(outcome, message) if self._gang.attempt == handle else None

    def free_gangs(self) -> int:
        """Return 1 if the gang is free, else 0."""
        return int(self._gang.attempt is None)

    def warm_up(self, model: Model) -> None:
        """Start the ranks in advance; see `GangsRunner`."""
        self._gang.warm_up(model)

    def close(self) -> None:
        """End every rank; see `Runner`."""
        super().close()
        self._gang.close()
