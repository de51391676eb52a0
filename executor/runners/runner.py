"""The interface of a runner."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from search_spaces.trial import LogLines, NodeEvent, Progress, TrialRequest, TrialResult

Handle = str
"""A submitted attempt: the request's attempt token."""
Event = Progress | LogLines | TrialResult | NodeEvent


class Runner(ABC):
    """Runs trial requests and returns their events and results.

    - The runner owns a submitted attempt until it has returned its `TrialResult` from `events`: exactly one for each
      submitted attempt, whatever happened to it. A runner never raises because of a trial.
    - The output of ranks during an attempt is returned as `LogLines`, bounded, before the attempt's result.
    - A trial that exceeds its `timeout_seconds` is killed (TIMEOUT), and its devices are free again within seconds.
    - Methods are called from one thread; only `cancel` may be called from any thread and from a signal handler.
    - After `close` no process of the runner is left; running attempts get no result. `close` may be called twice.

    Raises:
        RunnerError: ranks cannot be started or placed at all (never because of one trial).
    """

    @abstractmethod
    def submit(self, request: TrialRequest) -> Handle:
        """Start the attempt, or queue it until there is capacity. Returns at once."""

    @abstractmethod
    def events(self, timeout: float) -> list[tuple[Handle, Event]]:
        """Return the new events in order, waiting up to `timeout` seconds for the first. Node events have the handle ""."""

    @abstractmethod
    def cancel(self, handle: Handle, reason: str) -> None:
        """Abort an attempt; `events` returns its result (CANCELLED, with the reason). An unknown handle is ignored."""

    @abstractmethod
    def capacity(self) -> int:
        """Return how many further attempts would start at once."""

    def node_capacities(self) -> Mapping[str, int]:
        """Live node -> ranks that it could hold if nothing ran on it; empty: the runner does not distinguish nodes."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End every process and release all resources."""

    def run(self, request: TrialRequest) -> TrialResult:
        """Submit one attempt and wait for its result. Only for a runner that is otherwise idle: other events are dropped."""
        handle = self.submit(request)
        while True:
            for of, event in self.events(1.0):
                if of == handle and isinstance(event, TrialResult):
                    return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
