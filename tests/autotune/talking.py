"""A stand-in for `executor.trial.run.run_trial` whose ranks print, and end when they are let: for tests of what is printed.

Rank processes import it by name from this folder. As a program: the job of the database in a folder, run on such ranks.
"""

import os
import sys
import time
from pathlib import Path

from search_spaces.outcome import Outcome
from search_spaces.trial import Interval, Progress, TrialResult

FLOOD = 10_000_000
"""Bytes of a flood."""


def run_trial(context, request, progress):
    """Rank 0 prints as the file `talk` says: a flood, or a few lines and then nothing until the file `go` is there."""
    folder = Path(os.environ["TALK_FOLDER"])
    sys.stdout.write(f"rank {context.rank} of {request.config.micro_batch_size} begins\n")
    if context.rank == 0:
        progress(Progress(attempt=request.attempt, phase="measure", step=5, samples_per_second=80.0))
        if (folder / "talk").read_text() == "flood":
            flood()
        until = time.monotonic() + 60.0
        while not (folder / "go").exists() and time.monotonic() < until:
            time.sleep(0.02)
        sys.stderr.write("rank 0 was let go\n")
    rate = Interval(mean=80.0, low=79.0, high=81.0)
    return TrialResult(
        attempt=request.attempt, outcome=Outcome.OK, losses=(5.0, 4.5), step_seconds=(0.1,) * 5, samples_per_second=rate,
        within_relative_error=0.01, peak_memory_bytes=10**6,
    )  # fmt: skip


def flood():
    """Print so many bytes, as fast as can be."""
    line = b"." * 999 + b"\n"
    for _ in range(FLOOD // len(line)):
        os.write(1, line)


def ranks(folder: Path):
    """Two such ranks."""
    from executor.runners.local import LocalRunner

    environment = {"PYTHONPATH": str(Path(__file__).parent), "TALK_FOLDER": str(folder)}
    return LocalRunner(2, environment=environment, trial_function="talking:run_trial")


def main(folder: Path) -> None:
    from autotune.loop.loop import run_job
    from autotune.session.resolve import session_of
    from storage.store import open_store

    with open_store(str(folder / "jobs.db")) as store, ranks(folder) as runner:
        job = store.jobs.get()
        run_job(session_of(job), store, job.id, runner)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
