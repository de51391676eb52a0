"""What timed steps cost a rank beside their seconds."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from executor.measurement.device import DeviceEvents, counters_of
from executor.measurement.timing import StepTime, step_time
from search_spaces.trial import CollectiveCount

Sent = Mapping[tuple[str, str], tuple[int, int]]
"""(operation, mesh dimension) -> (count, bytes), since the session was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one step of this rank, but for the retries."""

    cpu_seconds: float = 0.0
    device_seconds: float | None = None
    collectives: tuple[CollectiveCount, ...] = ()
    compute_seconds: float | None = None
    """In which this rank waited for no other; None: not known."""
    wait_seconds: float | None = None
    compute_relative_error: float | None = None
    """Standard error of `compute_seconds`, as a share of it; None: not known."""
    retries: int | None = None
    """Times that the caching allocator had to flush its cache in all of the timed steps; None: the device has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTime:
    """What a rank knows of its own time."""

    seconds: float = 0.0
    """That the last step took on this rank, from the moment at which all of them began it."""
    waited: float | None = None
    """That steps were held up by other ranks, since the session was built; None: the engine cannot tell."""


class Meter:
    """Runs the timed steps of one count of micro-batches."""

    def __init__(self, device: torch.device, sent: Callable[[], Sent], own: Callable[[], OwnTime] = OwnTime) -> None:
        """`own` tells this rank's own time, after each step."""
        self.seconds: list[float] = []
        self._counters, self._events, self._sent, self._own = counters_of(device), DeviceEvents(device), sent, own
        self._began: list[float] = []
        self._computed: list[float | None] = []
        self._waited: list[float | None] = []
        self._cpu_seconds: list[float] = []
        self._retries: list[int | None] = []
        self._collectives: tuple[CollectiveCount, ...] = ()

    @property
    def has_clock(self) -> bool:
        """Whether steps can be timed by the device, many in a window, without the host's waiting for each."""
        return self._events.on

    def run(self, step: Callable[[DeviceEvents], float]) -> float:
        """Run one step. Returns its seconds, the slowest rank's."""
        return self.run_window(lambda events: [step(events)])[-1]

    def run_window(self, steps: Callable[[DeviceEvents], list[float]]) -> list[float]:
        """Run several steps. Returns the seconds of each, the slowest rank's; what they cost is shared out evenly."""
        before, retries, began = dict(self._sent()), self._counters.allocation_retries(), time.process_time()
        waited_before = self._own().waited
        start = time.monotonic()
        seconds = steps(self._events)
        count = len(seconds)
        self._began += itertools.accumulate(seconds[:-1], initial=start)
        self.seconds += seconds
        self._cpu_seconds += count * [(time.process_time() - began) / count]
        more = self._counters.allocation_retries()
        self._retries += [None if more is None or retries is None else more - retries, *(count - 1) * [None]]
        self._collectives = _difference(before, self._sent(), count)
        own = self._own()
        waited = None if own.waited is None or waited_before is None else (own.waited - waited_before) / count
        self._waited += count * [waited]
        self._computed += count * [None if waited is None else max(own.seconds - waited, 0.0)]
        return seconds

    @property
    def began(self) -> float:
        """When the first of the steps so far began, by `time.monotonic`; now, where there is none."""
        return self._began[0] if self._began else time.monotonic()

    def keep(self, last: int) -> None:
        """Forget all steps but the last so many."""
        for values in (self.seconds, self._cpu_seconds, self._retries, self._computed, self._waited, self._began):
            del values[: max(len(values) - last, 0)]
        self._events.keep(last)

    def costs(self) -> Costs:
        """The mean over the steps so far. Every step sends the same, so that the last one's collectives are every one's."""
        computed = [seconds for seconds in self._computed if seconds is not None]
        waited = [seconds for seconds in self._waited if seconds is not None]
        compute = step_time(computed) if computed else None
        return Costs(
            compute_seconds=compute.mean if compute else None,
            wait_seconds=fmean(waited) if waited else None,
            compute_relative_error=_known_error(compute),
            cpu_seconds=fmean(self._cpu_seconds),
            device_seconds=self._events.mean(),
            collectives=self._collectives,
            retries=sum_of_known(self._retries),
        )


def _known_error(time: StepTime | None) -> float | None:
    """None where there are too few steps to tell."""
    return time.relative_error if time is not None and math.isfinite(time.relative_error) else None


def sum_of_known(counts: Sequence[int | None]) -> int | None:
    """None where none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _difference(before: Sent, after: Sent, steps: int) -> tuple[CollectiveCount, ...]:
    """Of one of so many steps, each of which sends the same."""
    found = []
    for (operation, dimension), (count, size) in sorted(after.items()):
        count_before, size_before = before.get((operation, dimension), (0, 0))
        found.append(
            CollectiveCount(
                operation=operation,
                mesh_dimension=dimension,
                count=(count - count_before) // steps,
                bytes=(size - size_before) // steps,
            )
        )
    return tuple(found)
