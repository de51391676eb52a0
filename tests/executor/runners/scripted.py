"""A stand-in for `executor.trial.run_trial`: does what the request's `engine` says, as `WHAT` or `WHAT@RANK`.

Rank processes import it by name from this folder; everything that it uses is imported at its top, as in the real one.
"""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from executor.errors import EngineRefusalError, MemoryLimitError, WrongResultError
from search_spaces.outcome import Outcome
from search_spaces.trial import Progress, TrialResult


def run_trial(context, request, progress):
    what, _, rank = request.engine.partition("@")
    if not rank or int(rank) == context.rank:
        globals().get(what, measure)(context, request, progress)
    return measure(context, request, progress)


def measure(context, request, progress):
    """Every rank takes part in collectives of both groups, so that a group that is not whole is noticed."""
    total = torch.ones(4)
    dist.all_reduce(total)
    if context.control_group is not None:
        dist.all_reduce(total, group=context.control_group)
    return TrialResult(
        attempt=request.attempt,
        outcome=Outcome.OK,
        losses=(float(total[0]),),
        phase_seconds={"build": 0.0},
        environment={"pid": str(os.getpid()), "threads": str(torch.get_num_threads())},
    )


def stream(context, request, progress):
    for step in range(3):
        progress(Progress(attempt=request.attempt, phase="measure", step=step))
        time.sleep(0.3)


def refuse(context, request, progress):
    raise EngineRefusalError("pipeline-zero-3", "a pipeline cannot shard parameters; use stage 0-2")


def exceed(context, request, progress):
    raise MemoryLimitError("peak of 2 GiB is beyond the limit of 1 GiB")


def diverge(context, request, progress):
    raise WrongResultError("the loss is not finite")


def allocate(context, request, progress):
    torch.empty(2**60, dtype=torch.uint8)


def stumble(context, request, progress):
    {}["missing key"]


def leave(context, request, progress):
    sys.stderr.write("leaving without a word\n")
    os._exit(3)


def die(context, request, progress):
    os.kill(os.getpid(), signal.SIGKILL)


def crash(context, request, progress):
    os.kill(os.getpid(), signal.SIGSEGV)


def quit_python(context, request, progress):
    sys.exit("the configuration is not for me")


def hang(context, request, progress):
    progress(Progress(attempt=request.attempt, phase="build", step=0))
    time.sleep(3600)


def spawn(context, request, progress):
    """Starts a process of its own, as data loaders do, and hangs."""
    child = subprocess.Popen(["sleep", "3600"])
    progress(Progress(attempt=request.attempt, phase="build", step=0, message=str(child.pid)))
    hang(context, request, progress)


def import_users(context, request, progress):
    """Imports the user's modules by the names of ours, as a factory does."""
    import project

    assert project.build() == "theirs", project.build()
