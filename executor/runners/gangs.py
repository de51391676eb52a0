"""The source of the gangs that run a runner's trials."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from executor.runners.gang import Gang, Work
from executor.runners.runner import Event, Handle
from search_spaces.models.model import Model
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult


class Gangs(ABC):
    """The gangs of a runner, each of which runs one attempt at a time. Used from one thread.

    Every attempt that `begin` has accepted gets one result, from `poll` or from `end`.

    Raises:
        RunnerError: ranks cannot be started or placed at all; from every method except `close`.
    """

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

    def node_capacities(self) -> Mapping[str, int]:
        """Node -> ranks that it could hold if nothing ran on it; empty: the runner does not distinguish nodes."""
        return {}

    @abstractmethod
    def warm_up(self, model: Model) -> None:
        """Start processes for coming trials of this model, without waiting for them."""

    @abstractmethod
    def close(self) -> None:
        """End every process and release all resources. May be called twice."""


class OneGang(Gangs):
    """A single gang for trials of `world_size` ranks; None: any number."""

    def __init__(self, world_size: int | None, gang: Gang) -> None:
        self._world_size = world_size
        self._gang = gang
        self._refused: list[Event] = []

    def begin(self, request: Work) -> bool:
        """Accept the attempt if the gang is free; see `Gangs`."""
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
        """Return the new events; see `Gangs`."""
        if self._refused:
            refused, self._refused = self._refused, []
            return refused
        if self._gang.attempt is None:
            time.sleep(timeout)
            return []
        return list(self._gang.poll(timeout))

    def end(self, handle: Handle, outcome: Outcome, message: str) -> TrialResult | None:
        """Abort the attempt if it is running; see `Gangs`."""
        return self._gang.end(outcome, message) if self._gang.attempt == handle else None

    def free_gangs(self) -> int:
        """Return 1 if the gang is free, else 0."""
        return int(self._gang.attempt is None)

    def warm_up(self, model: Model) -> None:
        """Start the ranks in advance; see `Gangs`."""
        self._gang.warm_up(model)

    def close(self) -> None:
        """End every rank; see `Gangs`."""
        self._gang.close()
