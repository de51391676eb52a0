"""Jobs with trials in a state that a test wants, without ranks."""

from pathlib import Path
from typing import Any

import table

from autotune.loop.loop import run_job
from autotune.request.rows import request_to_row
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store

LIMIT = 30_000_000


def measured(config: TrialConfig) -> TrialResult:
    """As `table.measured`; stage 0 with the largest micro-batch does not fit."""
    if config.zero_stage == 0 and config.micro_batch_size >= 4:
        return table.ended(Outcome.INFEASIBLE, "out of memory on rank 1")
    return table.measured(config)


def swept(folder: Path, store: Store, answer: Any = measured, **changes: Any) -> str:
    """The id of a job that ran to its end."""
    fields = {"strategy": "random", "trials": 12, "racing": False, "confirm_repeats": 1, "memory_limit": LIMIT} | changes
    session = table.session(folder, **fields)
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner(answer))
    return job.id


def waiting(folder: Path, store: Store, **changes: Any) -> str:
    """The id of a job that nobody has begun."""
    return store.jobs.create(request_to_row(table.session(folder, **changes).request)).id
