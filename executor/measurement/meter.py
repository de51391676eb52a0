"""What timed steps cost a rank beside their seconds."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from executor.measurement.device import DeviceEvents, allocation_retries
from search_spaces.trial import CollectiveCount

Sent = Mapping[tuple[str, str], tuple[int, int]]
"""(operation, mesh dimension) -> (count, bytes), since the session was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one step of this rank, but for the retries."""

    cpu_seconds: float = 0.0
    device_seconds: float | None = None
    collectives: tuple[CollectiveCount, ...] = ()
    retries: int | None = None
    """Times that the caching allocator had to flush its cache in all of the timed steps; None: the device has none."""


class Meter:
    """Runs the timed steps of one count of micro-batches."""

    def __init__(self, device: torch.device, sent: Callable[[], Sent]) -> None:
        self.seconds: list[float] = []
        self._device, self._events, self._sent = device, DeviceEvents(device), sent
        self._cpu_seconds: list[float] = []
        self._retries: list[int | None] = []
        self._collectives: tuple[CollectiveCount, ...] = ()

    def run(self, step: Callable[[DeviceEvents], float]) -> float:
        """Run one step. Returns its seconds, the slowest rank's."""
        before, retries, began = dict(self._sent()), allocation_retries(self._device), time.process_time()
        self.seconds.append(step(self._events))
        self._cpu_seconds.append(time.process_time() - began)
        more = allocation_retries(self._device)
        self._retries.append(None if more is None or retries is None else more - retries)
        self._collectives = _difference(before, self._sent())
        return self.seconds[-1]

    def keep(self, last: int) -> None:
        """Forget all steps but the last so many."""
        for values in (self.seconds, self._cpu_seconds, self._retries):
            del values[: max(len(values) - last, 0)]
        self._events.keep(last)

    def costs(self) -> Costs:
        """The mean over the steps so far. Every step sends the same, so that the last one's collectives are every one's."""
        return Costs(
            cpu_seconds=fmean(self._cpu_seconds),
            device_seconds=self._events.mean(),
            collectives=self._collectives,
            retries=sum_of_known(self._retries),
        )


def sum_of_known(counts: Sequence[int | None]) -> int | None:
    """None where none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _difference(before: Sent, after: Sent) -> tuple[CollectiveCount, ...]:
    found = []
    for (operation, dimension), (count, size) in sorted(after.items()):
        count_before, size_before = before.get((operation, dimension), (0, 0))
        found.append(
            CollectiveCount(operation=operation, mesh_dimension=dimension, count=count - count_before, bytes=size - size_before)
        )
    return tuple(found)
