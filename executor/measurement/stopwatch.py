"""Times a function on all ranks together: warm-up, repetitions, the slowest rank."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.engine import RankContext
from executor.measurement.agreement import gather_numbers

DEVICE_SAMPLE_SECONDS = 1e-3
"""Least duration of a sample, which repeats the run until then: well above the resolution of events."""
HOST_SAMPLE_SECONDS = 4e-3
"""The same with the host's clock: at least a time slice of the scheduler, so that other processes slow all samples alike."""
MOST_RUNS = 1000
LEAST_SAMPLES = 3
MOST_SAMPLES = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Duration of one run, in seconds."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    samples: int


class Stopwatch:
    """Times runs on all ranks at once. Each rank calls the same methods in the same order and gets the same results."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._began = time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the stopwatch was created, as the maximum over the ranks."""
        return self.slowest(time.monotonic() - self._began)

    def slowest(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        return max(row[0] for row in gather_numbers(self._context, [value]))

    def measure(self, run: Callable[[], object], allowed: float, *, on_host: bool = False) -> Timing:
        """Time `run` for about `allowed` seconds; `on_host` measures only the host's time, not the device's.

        1. Run it once for lazy initialization, and once more to estimate its duration.
        2. Agree on the number of samples and of runs per sample, so that collectives match.
        3. Take the slowest rank of each sample, then the median of the samples.
        """
        self._sample(run, 1, on_host)
        once = max(self.slowest(self._sample(run, 1, on_host)), 1e-7)
        least = HOST_SAMPLE_SECONDS if on_host or self._context.device.type != "cuda" else DEVICE_SAMPLE_SECONDS
        runs = min(math.ceil(least / once), MOST_RUNS)
        count = min(max(int(allowed / (runs * once)), LEAST_SAMPLES), MOST_SAMPLES)
        mine = [self._sample(run, runs, on_host) / runs for _ in range(count)]
        slowest = [max(column) for column in zip(*gather_numbers(self._context, mine), strict=True)]
        low, median, high = statistics.quantiles(slowest, n=4, method="inclusive")
        return Timing(median=median, low=low, high=high, samples=count)

    def _sample(self, run: Callable[[], object], runs: int, on_host: bool) -> float:
        if self._context.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(runs):
                run()
            return time.perf_counter() - began
        return _on_host(run, runs) if on_host else _by_events(run, runs)


def _on_host(run: Callable[[], object], runs: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(runs):
        run()
    seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    return seconds


def _by_events(run: Callable[[], object], runs: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(runs):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
