"""Run by the kill test: makes or resumes the one job of a database, with trials that take a while."""

import sys
from pathlib import Path
from typing import Any

import table

from autotune.loop.loop import run_job
from autotune.request.rows import request_to_row
from autotune.session.resolve import session_of
from storage.store import open_store

JOB: dict[str, Any] = {"trials": 14, "environment_settings": ("MALLOC_ARENA_MAX=1", "OMP_WAIT_POLICY=passive")}
"""Twelve trials of the search, two of its last stage, then the confirmation."""


def main(folder: Path, strategy: str) -> None:
    """Go on with the job until it ends or this process is killed."""
    with open_store(str(folder / "jobs.db")) as store:
        jobs = store.jobs.newest()
        if jobs:
            job, session = jobs[0], session_of(jobs[0])
        else:
            session = table.session(folder, strategy=strategy, **JOB)
            job = store.jobs.create(request_to_row(session.request))
        print("running", flush=True)  # noqa: T201  the test waits for it
        # One at a time where what is tried next depends on what has ended: with two, chance says which ends first.
        slots = 1 if strategy == "guided" else 2
        run_job(session, store, job.id, table.runner(seconds_per_trial=0.08, slots=slots))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
