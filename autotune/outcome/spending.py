"""What a job has cost, and when that has paid."""

from typing import Any

from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import Verdict
from autotune.request.request import Objective
from autotune.session.session import Session


def spent(session: Session, book: JobSnapshot, verdict: Verdict) -> dict[str, Any]:
    """Device-hours of the job; those of a run with the baseline from which on they are won back; those that a run saves.

    A run of H device-hours with the baseline takes H / gain with the best: H (1 - 1 / gain) less.
    """
    hours = session.device_hours(book.job.active_seconds)
    run = session.request.run_device_hours
    share = _saved_share(session, verdict)
    return {
        "device_hours": hours,
        "break_even_device_hours": hours / share if share else None,
        "run_device_hours": run,
        "saved_device_hours": None if run is None or share is None else run * share,
    }


def _saved_share(session: Session, verdict: Verdict) -> float | None:
    """Share of a run with the baseline that the best saves; None: no rate is compared, or nothing is gained."""
    if verdict.gain is None or session.request.objective is Objective.MEMORY or verdict.gain.mean <= 1.0:
        return None
    return 1 - 1 / verdict.gain.mean
