"""The cost of a job, and when it pays off."""

from typing import Any

from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import Verdict
from autotune.request.request import Objective
from autotune.session.session import Session


def spent(session: Session, snapshot: JobSnapshot, verdict: Verdict) -> dict[str, Any]:
    """Return the device-hours of the job, the length of a baseline run at which they break even, and what a run saves.

    A run of H device-hours with the baseline takes H / gain with the best, so it saves H (1 - 1 / gain).
    """
    hours = session.device_hours(snapshot.job.active_seconds)
    run = session.request.run_device_hours
    share = _saved_share(session, verdict)
    return {
        "device_hours": hours,
        "break_even_device_hours": hours / share if share else None,
        "run_device_hours": run,
        "saved_device_hours": None if run is None or share is None else run * share,
    }


def _saved_share(session: Session, verdict: Verdict) -> float | None:
    """Share of a baseline run that the best configuration saves; None: rates are not compared, or there is no gain."""
    if verdict.gain is None or session.request.objective is Objective.MEMORY or verdict.gain.mean <= 1.0:
        return None
    return 1 - 1 / verdict.gain.mean
