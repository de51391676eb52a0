"""Jobs played to their end on a table of measurements."""

from typing import Any

import table

from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.request.rows import request_to_row
from autotune.session.session import Session
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import Purpose
from storage.records import TrialRecord
from storage.store import Store


def run(session: Session, store: Store, runner: ReplayRunner | None = None, **rest: Any) -> JobSnapshot:
    """Run the job of the session, on `table.runner()` where no other is given."""
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, runner or table.runner(), **rest)
    return read_snapshot(store, job.id)


def searched(snapshot: JobSnapshot) -> list[TrialRecord]:
    """Its search trials, in order."""
    return [trial for trial in snapshot.trials if trial.purpose is Purpose.SEARCH]
