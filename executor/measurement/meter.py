"""Measures what timed steps cost a rank, extrapolates full steps from steps of two smaller counts, and traces a step."""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.profiler import profile

from executor.measurement.device import DeviceEvents, counters_of
from executor.measurement.timing import step_time
from search_spaces.training.fewer import at_full, fewer_micro_batches
from search_spaces.trial import CollectiveCount, RankMeasurement, TrialRequest

Sent = Mapping[tuple[str, str], tuple[int, int]]
"""(operation, mesh dimension) -> (count, bytes), since the session was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of one step on this rank, by their names in `RankMeasurement`; `allocation_retries` covers all timed steps."""

    cpu_seconds_per_step: float = 0.0
    device_seconds_per_step: float | None = None
    collectives: tuple[CollectiveCount, ...] = ()
    compute_seconds_per_step: float | None = None
    wait_seconds_per_step: float | None = None
    compute_relative_error: float | None = None
    allocation_retries: int | None = None

    def by_name(self) -> dict[str, Any]:
        """Field of `RankMeasurement` -> its value."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTime:
    """A rank's own times."""

    seconds: float = 0.0
    """Duration of the last step on this rank, from the moment at which all ranks began it."""
    waited: float | None = None
    """Seconds that steps waited for other ranks since the session was built; None: the engine does not measure it."""


class Meter:
    """Runs timed steps with a fixed number of micro-batches."""

    def __init__(self, device: torch.device, sent: Callable[[], Sent], own_time: Callable[[], OwnTime] = OwnTime) -> None:
        """`own_time` returns this rank's own times after each step."""
        self.seconds: list[float] = []
        self._counters, self._events, self._sent, self._own = counters_of(device), DeviceEvents(device), sent, own_time
        self._began: list[float] = []
        self._computed: list[float | None] = []
        self._waited: list[float | None] = []
        self._cpu_seconds: list[float] = []
        self._retries: list[int | None] = []
        self._collectives: tuple[CollectiveCount, ...] = ()

    @property
    def has_clock(self) -> bool:
        """Whether the device can time steps, many in a window, without the host waiting for each."""
        return self._events.on

    def run(self, step: Callable[[DeviceEvents], float]) -> float:
        """Run one step. Return the slowest rank's seconds."""
        return self.run_window(lambda events: [step(events)])[-1]

    def run_window(self, steps: Callable[[DeviceEvents], list[float]]) -> list[float]:
        """Run several steps. Return the slowest rank's seconds of each. Their costs are divided evenly."""
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
        own_time = self._own()
        waited = None if own_time.waited is None or waited_before is None else (own_time.waited - waited_before) / count
        self._waited += count * [waited]
        self._computed += count * [None if waited is None else max(own_time.seconds - waited, 0.0)]
        return seconds

    @property
    def began(self) -> float:
        """Start of the first recorded step, by `time.monotonic`; now if there is none."""
        return self._began[0] if self._began else time.monotonic()

    def keep(self, last: int) -> None:
        """Discard all steps except the last `last`."""
        for values in (self.seconds, self._cpu_seconds, self._retries, self._computed, self._waited, self._began):
            del values[: max(len(values) - last, 0)]
        self._events.keep(last)

    def costs(self) -> Costs:
        """Return the mean over the recorded steps. All steps send the same messages, so the last one's collectives are used."""
        computed = [seconds for seconds in self._computed if seconds is not None]
        waited = [seconds for seconds in self._waited if seconds is not None]
        compute = step_time(computed) if computed else None
        return Costs(
            compute_seconds_per_step=compute.mean if compute else None,
            wait_seconds_per_step=fmean(waited) if waited else None,
            # Not finite with too few steps.
            compute_relative_error=compute.relative_error if compute and math.isfinite(compute.relative_error) else None,
            cpu_seconds_per_step=fmean(self._cpu_seconds),
            device_seconds_per_step=self._events.mean(),
            collectives=self._collectives,
            allocation_retries=sum_of_known(self._retries),
        )


def sum_of_known(counts: Sequence[int | None]) -> int | None:
    """Return the sum of the known counts; None if none is known."""
    known_counts = [count for count in counts if count is not None]
    return sum(known_counts) if known_counts else None


def _difference(before: Sent, after: Sent, steps: int) -> tuple[CollectiveCount, ...]:
    """Return the collectives of one of `steps` identical steps."""
    collectives = []
    for (operation, dimension), (count, size) in sorted(after.items()):
        count_before, size_before = before.get((operation, dimension), (0, 0))
        collectives.append(
            CollectiveCount(
                operation=operation,
                mesh_dimension=dimension,
                count=(count - count_before) // steps,
                bytes=(size - size_before) // steps,
            )
        )
    return tuple(collectives)


def trace_steps(step: Callable[[], object], device: torch.device, path: Path, count: int = 1) -> None:
    """Run `step` under the profiler and write the trace, in a folder that is made if it does not exist.

    The trace has the operators with the shapes of their inputs, and on CUDA the kernels and copies too.
    Graphs that were captured before are slower afterwards (`account_step`), so this belongs after every measurement.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a list of activities: all that this build of torch supports. acc_events: as in account_step.
    with profile(record_shapes=True, acc_events=True) as recorder:
        for _ in range(count):
            step()
        counters_of(device).synchronize()
    recorder.export_chrome_trace(str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through two counts: the cost of a step grows by a constant for every micro-batch, and for every layer.

    Both steps include the fixed costs (the last reduction, the update, filling a pipeline). These are therefore neither omitted
    nor counted for every micro-batch, as they would be if the time of a short step were multiplied.
    """

    first: int
    second: int
    full: int
    """Micro-batches, or layers, of the requested step; more than `second`."""

    def at_full(self, first: float, second: float) -> float:
        """Return the value at the full count from the values at the two counts."""
        return at_full(self.full, (self.first, self.second), first, second)

    def whole_at_full(self, first: int, second: int) -> int:
        """Like `at_full` for integers such as counts and bytes, rounded; at least 0, even if the line falls below."""
        growth, distance = (self.full - self.second) * (second - first), self.second - self.first
        return max(second + (2 * growth + distance) // (2 * distance), 0)

    def tags_at_full(self, first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
        """Bytes by tag."""
        return {tag: self.whole_at_full(first.get(tag, 0), size) for tag, size in second.items()}

    def collectives_at_full(
        self, first: Iterable[CollectiveCount], second: Iterable[CollectiveCount]
    ) -> tuple[CollectiveCount, ...]:
        """Messages of a full step. They are sums over micro-batches, or layers, so this is exact."""
        before = {(sent.operation, sent.mesh_dimension): (sent.count, sent.bytes) for sent in first}
        counts = []
        for sent in second:
            count, size = before.get((sent.operation, sent.mesh_dimension), (0, 0))
            grown, bytes_grown = self.whole_at_full(count, sent.count), self.whole_at_full(size, sent.bytes)
            counts.append(dataclasses.replace(sent, count=grown, bytes=bytes_grown))
        return tuple(counts)

    def rises(self, first: Sequence[float], second: Sequence[float]) -> bool:
        """Whether the larger count took longer. If noise hides even that, nothing can be extrapolated."""
        return statistics.fmean(second) > statistics.fmean(first)

    def costs_at_full(self, first: Costs | RankMeasurement, second: Costs | RankMeasurement) -> Costs:
        """The costs of a full step."""

        def known(name: str) -> float | None:
            low, high = getattr(first, name), getattr(second, name)
            return None if low is None or high is None else self.at_full(low, high)

        # No error is given for extrapolated values, so that they cannot mark a node as slow.
        return Costs(
            cpu_seconds_per_step=max(self.at_full(first.cpu_seconds_per_step, second.cpu_seconds_per_step), 0.0),
            device_seconds_per_step=known("device_seconds_per_step"),
            compute_seconds_per_step=known("compute_seconds_per_step"),
            wait_seconds_per_step=known("wait_seconds_per_step"),
            collectives=self.collectives_at_full(first.collectives, second.collectives),
            allocation_retries=sum_of_known((first.allocation_retries, second.allocation_retries)),
        )


def line_of(request: TrialRequest) -> Line | None:
    """Return the line by which the request's steps are extrapolated; None: full steps are timed."""
    most = request.fidelity.most_micro_batches
    counts = fewer_micro_batches(request.config, request.workload, request.world_size, most)
    if counts is None:
        return None
    full = request.config.gradient_accumulation_steps(request.workload.global_batch_size, request.world_size)
    return Line(first=counts[0], second=counts[1], full=full)
