"""A trial in which rank 1 stops, hanging or dead, while the others wait for it in a collective.

Rank processes import it by name, as they import `executor.trial.run` otherwise. The request's `engine` says what happens. Each
rank writes its pid and that of a process that it has started into the folder of `FOLDER`; rank 1 also the time of its end.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from executor.engine import RankContext
from search_spaces.outcome import Outcome
from search_spaces.trial import Progress, TrialRequest, TrialResult

FOLDER = "AUTOTUNE_BENCHMARK_FOLDER"
HANGS, DIES, ENDS = "hangs", "dies", "ends"


def run_trial(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    """What `request.engine` says."""
    dist.all_reduce(torch.ones(1))
    if request.engine != ENDS:
        progress(Progress(attempt=request.attempt, phase="measure", step=0))
        child = subprocess.Popen(["sleep", "3600"])
        folder = Path(os.environ[FOLDER])
        (folder / f"pids-{context.rank}").write_text(f"{os.getpid()} {child.pid}")
        dist.barrier()
        if context.rank == 1:
            _stop(request.engine, folder)
        dist.barrier()
    return TrialResult(attempt=request.attempt, outcome=Outcome.OK)


def _stop(how: str, folder: Path) -> None:
    if how == HANGS:
        time.sleep(3600)
    # Of the whole machine, so that the parent's clock tells the same [clock_gettime(2), CLOCK_MONOTONIC].
    (folder / "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
