"""Processes that use a database at once: imports everything, then forks a child for each line that it reads.

Lines: `start TASK ADDRESS JOB` answers with the child's pid; `wait` waits for all children and answers how many failed.
Children that are killed stay zombies until `wait`, as those of a busy parent do.
"""

import contextlib
import itertools
import os
import random
import sys
import time
import traceback
from collections.abc import Callable

from alembic import command  # noqa: F401  imported before the fork, so that each child need not

from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import RankMeasurement, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.errors import LeaseHeldError
from storage.leases import current_owner
from storage.records import Lease
from storage.store import Store, open_store


def measured(attempt: str, outcome: Outcome) -> TrialResult:
    ranks = tuple(
        RankMeasurement(
            rank=rank,
            host="here",
            peak_memory_bytes=2**40,
            memory_by_tag={"parameters": 2**40},
            tag_peak_bytes={"parameters": 2**40},
            rss_peak_bytes=1,
            cpu_seconds_per_step=0.5,
            collectives=(),
        )
        for rank in range(2)
    )
    return TrialResult(attempt=attempt, outcome=outcome, ranks=ranks)


def acquired(store: Store, job_id: str) -> Lease:
    """The job, once nobody else holds it: one that was killed takes a moment to die."""
    while True:
        with contextlib.suppress(LeaseHeldError):
            return store.jobs.acquire(job_id, current_owner(), seconds=3600)
        time.sleep(random.uniform(0.001, 0.01))


def sweep(store: Store, job_id: str) -> None:
    """Take the job, and write trials for ever."""
    lease = acquired(store, job_id)
    done = len(store.trials.of(job_id))
    for number in itertools.count(done):
        trial = store.trials.add(lease, TrialConfig(micro_batch_size=number + 1), Purpose.SEARCH)
        result = measured(store.attempts.start(lease, trial.number).token, Outcome.OK)
        if not store.attempts.finish(lease, result, retry=random.random() < 0.3):
            raise RuntimeError("the holder's result was refused")
        store.events.add(lease, "note", {"trial": trial.number})
        lease = store.jobs.heartbeat(lease, seconds=3600)


def share(store: Store, job_id: str) -> None:
    """Hold the job ten times, and add events each time."""
    for _ in range(10):
        lease = acquired(store, job_id)
        for _ in range(3):
            store.events.add(lease, "note", {"pid": os.getpid()})
        store.jobs.release(lease, JobState.PAUSED, "", "")


def hold(store: Store, job_id: str) -> None:
    """Take the job and sit on it."""
    store.jobs.acquire(job_id, current_owner(), seconds=3600)
    time.sleep(60)


def look(store: Store, job_id: str) -> None:
    """Open the database, and no more."""
    store.jobs.newest()


TASKS: dict[str, Callable[[Store, str], None]] = {"sweep": sweep, "share": share, "hold": hold, "look": look}


def child(task: str, address: str, job_id: str) -> int:
    try:
        with open_store(address, busy_seconds=20) as store:
            TASKS[task](store, job_id)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main() -> None:
    for line in sys.stdin:
        verb, *arguments = line.split()
        if verb == "start":
            pid = os.fork()
            if pid == 0:
                os._exit(child(*arguments))
            answer(pid)
        else:
            failed = 0
            with contextlib.suppress(ChildProcessError):
                while True:
                    failed += os.waitstatus_to_exitcode(os.wait()[1]) != 0
            answer(failed)


main()
