"""The function that a rank process runs for the runner `dry` and for `autotune dry-run`: all pipeline positions in turn."""

import socket
import time
from collections.abc import Callable

from executor.dry.dry_run import dry_run_places
from executor.engine import RankContext
from executor.errors import MemoryLimitError
from executor.runners.rank_loop import leave
from search_spaces.outcome import Outcome
from search_spaces.trial import DryRank, DryRun, Progress, RankMeasurement, TrialRequest, TrialResult

ReportProgress = Callable[[Progress], None]


def dry_gloo(_: RankContext, request: TrialRequest, progress: ReportProgress) -> DryRun:
    """Dry-run a request for CPUs with gloo."""
    return _places(request, progress, "gloo")


def dry_nccl(_: RankContext, request: TrialRequest, progress: ReportProgress) -> DryRun:
    """Dry-run a request for CUDA devices with NCCL."""
    return _places(request, progress, "nccl")


def trial_gloo(_: RankContext, request: TrialRequest, progress: ReportProgress) -> TrialResult:
    """Like `dry_gloo`, returned as a trial's result."""
    return _trial(request, progress, "gloo")


def trial_nccl(_: RankContext, request: TrialRequest, progress: ReportProgress) -> TrialResult:
    """Like `dry_nccl`, returned as a trial's result."""
    return _trial(request, progress, "nccl")


def _places(request: TrialRequest, progress: ReportProgress, backend: str) -> DryRun:
    leave()  # the process's own group of one rank, which the fake process group replaces

    def report(rank: int) -> None:
        progress(Progress(attempt=request.attempt, phase="dry run", step=0, message=f"rank {rank}"))

    return dry_run_places(request.model, request.config, request.workload, request.world_size, backend, request.engine, report)


def _trial(request: TrialRequest, progress: ReportProgress, backend: str) -> TrialResult:
    began = time.monotonic()
    dry_result = _places(request, progress, backend)
    limit = request.memory_limit_bytes
    worst = max(dry_result.ranks, key=lambda rank: rank.peak_memory_bytes)
    if limit is not None and worst.peak_memory_bytes > limit:
        raise MemoryLimitError(
            f"rank {worst.rank} would need {worst.peak_memory_bytes:,} bytes in a step, the limit is {limit:,}; "
            "use a smaller micro-batch, a higher ZeRO stage or activation checkpointing"
        )
    return TrialResult(
        attempt=request.attempt,
        outcome=Outcome.OK,
        message="dry run: nothing was timed",
        peak_memory_bytes=dry_result.peak_memory_bytes,
        ranks=tuple(map(_measurement, dry_result.ranks)),
        phase_seconds={"dry run": time.monotonic() - began},
        environment={"backend": backend, "dry": "true"},
    )


def _measurement(rank: DryRank) -> RankMeasurement:
    return RankMeasurement(
        rank=rank.rank,
        host=socket.gethostname(),
        peak_memory_bytes=rank.peak_memory_bytes,
        memory_by_tag=rank.memory_by_tag,
        tag_peak_bytes=rank.tag_peak_bytes,
        rss_peak_bytes=0,
        cpu_seconds_per_step=0.0,
        collectives=rank.collectives,
        host_memory_bytes=rank.host_memory_bytes,
    )
