"""What timed steps cost a rank beside their seconds."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from executor.measurement.device import DeviceEvents
from search_spaces.trial import CollectiveCount

Sent = Mapping[tuple[str, str], tuple[int, int]]
"""(operation, mesh dimension) -> (count, bytes), since the session was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one step of this rank."""

    cpu_seconds: float = 0.0
    device_seconds: float | None = None
    collectives: tuple[CollectiveCount, ...] = ()


class Meter:
    """Runs the timed steps of one count of micro-batches."""

    def __init__(self, device: torch.device, sent: Callable[[], Sent]) -> None:
        self.seconds: list[float] = []
        self._events, self._sent = DeviceEvents(device), sent
        self._cpu_seconds = 0.0
        self._collectives: tuple[CollectiveCount, ...] = ()

    def run(self, step: Callable[[DeviceEvents], float]) -> float:
        """Run one step. Returns its seconds, the slowest rank's."""
        before, began = dict(self._sent()), time.process_time()
        self.seconds.append(step(self._events))
        self._cpu_seconds += time.process_time() - began
        self._collectives = _difference(before, self._sent())
        return self.seconds[-1]

    def costs(self) -> Costs:
        """The mean over the steps so far. Every step sends the same, so that the last one's collectives are every one's."""
        return Costs(
            cpu_seconds=self._cpu_seconds / len(self.seconds),
            device_seconds=self._events.mean(),
            collectives=self._collectives,
        )


def _difference(before: Sent, after: Sent) -> tuple[CollectiveCount, ...]:
    found = []
    for (operation, dimension), (count, size) in sorted(after.items()):
        count_before, size_before = before.get((operation, dimension), (0, 0))
        found.append(
            CollectiveCount(operation=operation, mesh_dimension=dimension, count=count - count_before, bytes=size - size_before)
        )
    return tuple(found)
