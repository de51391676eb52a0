"""Where a runner has the gangs from that run its trials."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from executor.runners.gang import Gang, Work
from executor.runners.runner import Event, Handle
from search_spaces.model import Model
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult


class Gangs(ABC):
    """The gangs of a runner, each of which runs one attempt at a time. Used from one thread.

    Every attempt that `begin` has taken gets one result: from `poll`, or from `end`.

    Raises:
        RunnerError: ranks cannot be started or placed at all; from every method but `close`.
    """

    @abstractmethod
    def begin(self, request: Work) -> bool:
        """Take the attempt if it can start now. One that never can is taken too: `poll` has its result."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """What happened, waiting up to `timeout` seconds for something to happen."""

    @abstractmethod
    def end(self, handle: Handle, outcome: Outcome, message: str) -> TrialResult | None:
        """End a running attempt by force. None: it does not run."""

    @abstractmethod
    def room(self) -> int:
        """How many further attempts would start at once."""

    def rooms(self) -> Mapping[str, int]:
        """Node -> ranks that it could hold if nothing ran on it; empty: there is one place alone."""
        return {}

    @abstractmethod
    def warm_up(self, model: Model) -> None:
        """Start the processes of ranks that trials of this model will want soon, and do not wait for them."""

    @abstractmethod
    def close(self) -> None:
        """End every process and give everything back. May be called twice."""


class OneGang(Gangs):
    """A single gang, for trials of `world_size` ranks; None: of any number."""

    def __init__(self, world_size: int | None, gang: Gang) -> None:
        self._world_size = world_size
        self._gang = gang
        self._refused: list[Event] = []

    def begin(self, request: Work) -> bool:
        """Take the attempt where the gang is free; see `Gangs`."""
        if self._gang.attempt is not None:
            return False
        if self._world_size in (None, request.world_size):
            self._gang.start(request)
        else:
            wanted = f"the trial wants {request.world_size} ranks and this runner has {self._world_size}"
            message = f"{wanted}; start it with as many"
            refused = TrialResult(attempt=request.attempt, outcome=Outcome.INVALID, rule="world_size", message=message)
            self._refused.append(refused)
        return True

    def poll(self, timeout: float) -> list[Event]:
        """What happened; see `Gangs`."""
        if self._refused:
            refused, self._refused = self._refused, []
            return refused
        if self._gang.attempt is None:
            time.sleep(timeout)
            return []
        return list(self._gang.poll(timeout))

    def end(self, handle: Handle, outcome: Outcome, message: str) -> TrialResult | None:
        """End the attempt if it runs; see `Gangs`."""
        return self._gang.end(outcome, message) if self._gang.attempt == handle else None

    def room(self) -> int:
        """1 where the gang is free."""
        return int(self._gang.attempt is None)

    def warm_up(self, model: Model) -> None:
        """Start the ranks ahead; see `Gangs`."""
        self._gang.warm_up(model)

    def close(self) -> None:
        """End every rank; see `Gangs`."""
        self._gang.close()
