"""The contract of a runner."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from search_spaces.trial import LogLines, NodeEvent, Progress, TrialRequest, TrialResult

Handle = str
"""A submitted attempt: the request's attempt token."""
Event = Progress | LogLines | TrialResult | NodeEvent


class Runner(ABC):
    """Runs trial requests and tells what becomes of them.

    - The runner owns a submitted attempt until it has returned its `TrialResult` from `events`, exactly one for each
      attempt that was submitted, whatever happened to it: a runner never raises because of a trial.
    - What ranks print while an attempt runs comes as `LogLines`, bounded, before the attempt's result.
    - A trial that passes its `timeout_seconds` is ended by force (TIMEOUT) and its devices are free again within seconds.
    - Methods are called from one thread; only `cancel` may be called from any thread and from a signal handler.
    - After `close` no process of the runner is left; attempts that were running get no result. `close` may be called twice.

    Raises:
        RunnerError: ranks cannot be started or placed at all (never because of one trial).
    """

    @abstractmethod
    def submit(self, request: TrialRequest) -> Handle:
        """Start the attempt, or queue it until there is room. Returns at once."""

    @abstractmethod
    def events(self, timeout: float) -> list[tuple[Handle, Event]]:
        """Return what happened, in order, waiting up to `timeout` seconds for the first. Node events have handle ""."""

    @abstractmethod
    def cancel(self, handle: Handle, reason: str) -> None:
        """End an attempt by force; its result (CANCELLED, with the reason) comes through `events`. Unknown: ignored."""

    @abstractmethod
    def capacity(self) -> int:
        """How many further attempts would start at once."""

    def rooms(self) -> Mapping[str, int]:
        """Node -> ranks that it could hold if nothing ran on it, of the nodes that live; empty: there is one place alone."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End every process and give back every resource."""

    def run(self, request: TrialRequest) -> TrialResult:
        """Submit one attempt and wait for its result. For a runner that has nothing else to do: other events are dropped."""
        handle = self.submit(request)
        while True:
            for of, event in self.events(1.0):
                if of == handle and isinstance(event, TrialResult):
                    return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
