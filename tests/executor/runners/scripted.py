"""A stand-in for `executor.trial.run.run_trial`: does what the request's `engine` says, as `WHAT`, `WHAT@RANK` or `WHAT:PATH`.

Rank processes import it by name from this folder; everything that it uses is imported at its top, as in the real one.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from executor.errors import EngineRefusalError, MemoryLimitError, WrongResultError
from search_spaces.outcome import Outcome
from search_spaces.trial import Progress, TrialResult


def run_trial(context, request, progress):
    what, _, rank = request.engine.partition(":")[0].partition("@")
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
        environment={
            "pid": str(os.getpid()),
            "threads": str(torch.get_num_threads()),
            "cores": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "policy": os.environ.get("OMP_WAIT_POLICY", ""),
            "secrets": " ".join(sorted(name for name, value in os.environ.items() if value.startswith("secret of"))),
            "secrets_of_parent": str(Path(f"/proc/{os.getppid()}/environ").read_bytes().count(b"=secret of")),
        },
    )


def stream(context, request, progress):
    for step in range(3):
        progress(Progress(attempt=request.attempt, phase="measure", step=step))
        time.sleep(0.3)


def held(context, request, progress):
    """Tells its steps, and ends once the file is there."""
    stream(context, request, progress)
    wait_for(request)


def wait_for(request):
    file = Path(request.engine.partition(":")[2])
    while not file.exists():
        time.sleep(0.05)


def chatter(context, request, progress):
    """Prints on one stream, and on the other once the file is there."""
    sys.stdout.write(f"rank {context.rank} begins\n")
    wait_for(request)
    sys.stderr.write("to stderr ✓\n")
    sys.stdout.write("ends without a newline")


def flood(context, request, progress):
    """Prints 10,000,000 bytes as fast as it can."""
    line = "line {} of the flood".format
    end = "the end of the flood\n"
    written = 0
    number = 0
    while written < 9_900_000:
        text = (line(number) + " " + "." * 5000)[:5000] + "\n"
        sys.stdout.write(text)
        written += len(text)
        number += 1
    sys.stdout.write("." * (10_000_000 - written - len(end)) + end)


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


def stand(context, request, progress):
    """Two steps; then rank 0 waits in a collective to which rank 1 never comes, and has started a daemon of no known mark."""
    for step in range(3):
        progress(Progress(attempt=request.attempt, phase="measure", step=step))
        dist.barrier()
    if context.rank == 1:
        hang_up()
    shell = "setsid env -i sleep 3600 >/dev/null 2>&1 & echo $!"
    daemon = subprocess.run(["/bin/sh", "-c", shell], stdout=subprocess.PIPE, check=True).stdout.decode().strip()
    progress(Progress(attempt=request.attempt, phase="measure", step=2, message=daemon))
    dist.barrier()


def hang_up():
    time.sleep(3600)


def leak(context, request, progress):
    """Leaves as many files open as no trial does."""
    leaked.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(200))


leaked = []


def import_users(context, request, progress):
    """Imports the user's modules by the names of ours, as a factory does."""
    import project

    assert project.build() == "theirs", project.build()
