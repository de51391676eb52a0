"""The micro-benchmark on one rank, as a trial of a gang or quickly on forked ranks: times functions on all ranks together."""

import gc
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from executor.engine import RankContext
from executor.files.rank_file import QUICK_BYTES, FilePass
from executor.measurement.device import counters_of, environment
from executor.measurement.kernels import KernelCase, compute_cases, link_cases, open_groups
from executor.measurement.trial_report import gather_numbers, gather_plain
from search_spaces.clusters.microbenchmark import (
    COLLECTIVES,
    MeasuredRow,
    MicrobenchmarkRequest,
    MicrobenchmarkResult,
    Operation,
)
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.training.states import BUFFERS
from search_spaces.trial import Progress

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
        # A sample repeats the run for at least a time slice of the scheduler, so that other processes slow all samples alike;
        # on the device, well above the resolution of events.
        least = 4e-3 if on_host or self._context.device.type != "cuda" else 1e-3
        runs = min(math.ceil(least / once), 1000)
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


WEIGHTS = {Operation.LAYER: 4.0, Operation.HEAD: 2.0, Operation.PRODUCT: 2.0, Operation.PRODUCT_BACKWARD: 1.5}
"""Relative share of time for an operation (others: 1.0): layers determine most of a step."""
QUICK_SHAPES: Mapping[Operation, tuple[tuple[int, ...], ...]] = {
    Operation.PRODUCT: ((256, 128, 512), (1024, 128, 512)),
    Operation.LAYER: ((1, 8, 32, 1, 64), (1, 128, 128, 4, 344), (4, 128, 128, 4, 344)),
    Operation.HEAD: ((1, 128, 128, 512),),
    Operation.UPDATE: ((2**20,),),
}
"""CPU shapes of a quick measurement: layers from dominated by launches to dominated by products."""


def run_microbenchmark(
    context: RankContext, request: MicrobenchmarkRequest, progress: Callable[[Progress], None]
) -> MicrobenchmarkResult:
    """Measure the operations of `search_spaces.clusters.microbenchmark.Operation`. All ranks call this and get the same result.

    1. Local operations, on all ranks at once as in training, cheapest shapes first; files if a folder is given.
    2. Collectives over the ranks of a node, across nodes and over all ranks, small messages first.
    3. The memory that remains in use after all of that has been released.
    """
    hosts = tuple(gather_plain(context, socket.gethostname()))
    stopwatch = Stopwatch(context)
    cases = [case for case in compute_cases(context.device, request.precisions) if _wanted(case, request)]
    compute = sorted(cases, key=lambda case: (case.operation, case.precision, case.cost))
    files = [*file_cases(Path(request.nvme_path))] if request.nvme_path is not None else []
    # Share of the time for files, if a folder is given.
    file_share = 0.2
    # Of the time, 0.35 is for communication.
    share = (1.0 if context.world_size == 1 else 0.65) - (file_share if files else 0)
    bench = _Bench(context, request, stopwatch, progress)
    rows = bench.run(compute, share * request.seconds, "compute")
    rows += bench.run(files, file_share * request.seconds, "files")
    if context.world_size > 1:
        groups = open_groups(context, hosts)
        links = sorted(
            (case for case in link_cases(context, groups, request.largest_message_bytes) if _wanted(case, request)),
            key=lambda case: (case.group.ranks, case.group.in_node, case.operation, case.cost),
        )
        rows += bench.run(links, request.seconds - stopwatch.elapsed(), "links")
        for group in groups:
            dist.destroy_process_group(group.handle)
    return MicrobenchmarkResult(
        attempt=request.attempt,
        outcome=Outcome.OK,
        rows=tuple(rows),
        hosts=hosts,
        environment={**environment(context.device), **({"nvme_path": request.nvme_path} if request.nvme_path else {})},
        context_bytes=_largest(context, counters_of(context.device).outside_bytes()),
        workspace_bytes=_largest(context, _left_over(context.device)),
    )


def _wanted(case: KernelCase, request: MicrobenchmarkRequest) -> bool:
    if not request.quick:
        return True
    if case.operation in COLLECTIVES:
        return case.shape[0] in (2**12, 2**18)  # bytes of a message
    return case.shape in QUICK_SHAPES.get(case.operation, ())


class _Bench:
    """Runs cases within a given time."""

    def __init__(
        self, context: RankContext, request: MicrobenchmarkRequest, stopwatch: Stopwatch, progress: Callable[[Progress], None]
    ) -> None:
        self._context, self._request, self._stopwatch, self._progress = context, request, stopwatch, progress
        # One case may hold a quarter of the free memory.
        self._memory_budget = -stopwatch.slowest(-0.25 * _free_bytes(context))

    def run(self, cases: Sequence[KernelCase], seconds: float, phase: str) -> list[MeasuredRow]:
        """Return the cases' rows. Cases of one operation, precision and group form a family, which gets its share of the time
        that is left."""
        until = self._stopwatch.elapsed() + seconds
        families = [list(family) for _, family in groupby(cases, key=lambda case: (case.operation, case.precision, case.group))]
        weights = [self._weight(family[0]) for family in families]
        rows: list[MeasuredRow] = []
        for number, family in enumerate(families):
            if self._context.rank == 0:
                message = f"{family[0].operation} {family[0].precision}"
                self._progress(Progress(attempt=self._request.attempt, phase=phase, step=number, message=message))
            remaining = until - self._stopwatch.elapsed()
            rows += self._family(family, remaining * weights[number] / sum(weights[number:]))
        return rows

    def _weight(self, case: KernelCase) -> float:
        # The device supports it but seldom trains in it.
        rare = case.precision == "bf16" and self._context.device.type == "cpu"
        return WEIGHTS.get(case.operation, 1.0) * (0.3 if rare else 1.0)

    def _family(self, cases: Sequence[KernelCase], seconds: float) -> Iterator[MeasuredRow]:
        """Measure the cases, cheapest first, until the next would exceed the time or the memory. The first is always measured.
        A quick measurement measures all, with the fewest samples."""
        until = self._stopwatch.elapsed() + seconds
        last: tuple[float, float] | None = None
        for number, case in enumerate(cases):
            remaining = until - self._stopwatch.elapsed()
            expected = last[0] * case.cost / last[1] if last else 0.0
            # Five runs: two for warm-up and three samples.
            if case.memory > self._memory_budget or (last and 5 * expected > remaining and not self._request.quick):
                return
            run = case.make()
            allowed = 0.0 if self._request.quick else max(remaining, 0.0) / (len(cases) - number) - 2 * expected
            timing = self._stopwatch.measure(run, allowed, on_host=case.on_host)
            last = (timing.low, case.cost)  # not the median: noise must not exclude the further cases
            yield MeasuredRow(
                operation=case.operation, precision=case.precision, shape=case.shape, group=case.group,
                seconds=timing.median, low=timing.low, high=timing.high, samples=timing.samples,
            )  # fmt: skip


def file_cases(folder: Path) -> Iterator[KernelCase]:
    """Yield the cases of a folder's file system, read and written as the engine does, smallest file first."""
    passes = {
        Operation.FILE_READ: lambda extents: FilePass(folder, extents, QUICK_BYTES).read,
        Operation.FILE_UPDATE: lambda extents: FilePass(folder, extents, QUICK_BYTES).update,
    }
    for operation, make in passes.items():
        for extents in (4, 16):  # what fits into the buffers, and four times that
            size = extents * QUICK_BYTES
            yield KernelCase(
                operation=operation, precision="fp32", shape=(size,), cost=float(size), memory=float(BUFFERS * QUICK_BYTES),
                make=partial(make, extents), on_host=True,
            )  # fmt: skip


def _free_bytes(context: RankContext) -> float:
    """Return the free memory of the device, or this rank's share of the host's."""
    if context.device.type == "cuda":
        return float(torch.cuda.mem_get_info(context.device)[0])
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", context.world_size))
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")) / ranks


def _left_over(device: torch.device) -> int | None:
    """Return the bytes that CUDA's allocator still holds. CPU libraries have their workspaces outside torch's allocator."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated(device))


def _largest(context: RankContext, value: int | None) -> int | None:
    values = [number for number in gather_plain(context, value) if number is not None]
    return max(values) if values else None


def main() -> None:
    """Read a `MicrobenchmarkRequest` from standard input, write rank 0's result to standard output, both as JSON.

    For CPUs only, because a process that has used a GPU cannot be forked; so torch is loaded once.

    1. Fork all ranks except the first before anything computes, because a fork does not copy a library's threads.
    2. Join over a file, because no rank listens on a port that the others know.
    3. Exit without finalisers, because the other ranks may have left the group already.
    """
    request = from_plain(MicrobenchmarkRequest, json.load(sys.stdin))
    with tempfile.TemporaryDirectory() as folder:
        gc.freeze()
        rank = _forked(request.world_size)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        store = dist.FileStore(str(Path(folder) / "ranks"), request.world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=request.world_size)
        control = dist.new_group(backend="gloo") if request.world_size > 1 else None
        context = RankContext(rank=rank, world_size=request.world_size, device=torch.device("cpu"), control_group=control)
        result = run_microbenchmark(context, request, lambda _: None)
        if rank:
            os._exit(0)
        json.dump(to_plain(result), sys.stdout)
        sys.stdout.flush()
    os._exit(0)


def _forked(world_size: int) -> int:
    """Fork and return this process's rank; the original process has rank 0."""
    for rank in range(1, world_size):
        if os.fork() == 0:
            return rank
    return 0
