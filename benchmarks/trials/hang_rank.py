"""A trial in which rank 1 stops, hanging or dead, while the others wait for it in a collective.

Rank processes import this module by name in place of `executor.trial.run`. The request's `engine` selects what happens. Each
rank writes its pid and its child's pid into the folder of `FOLDER`; rank 1 also writes the time of its death.
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
    """End, hang or die, as `request.engine` says."""
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
    # A clock of the whole machine, comparable with the parent's [clock_gettime(2), CLOCK_MONOTONIC].
    (folder / "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
