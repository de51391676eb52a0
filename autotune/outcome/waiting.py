"""Why a queued job has not started, by the workers that are alive."""

from collections.abc import Sequence

from search_spaces.outcome import JobState
from storage.records import JobRecord
from storage.service_records import WorkerRecord


def waiting_text(job: JobRecord, workers: Sequence[WorkerRecord]) -> str:
    """Why the job waits, in a sentence without its end; empty: it is not queued.

    A job for devices that no worker has waits until one comes: it is neither refused, because workers come and go, nor taken by
    a worker that cannot run it.
    """
    if job.state is not JobState.QUEUED:
        return ""
    if not workers:
        return "no worker runs; start one with `autotune worker`"
    runner = str(job.request.get("runner") or "")
    kind = str(((job.request.get("resolved_cluster") or {}).get("device") or {}).get("kind") or "")
    is_elsewhere = job.request.get("ray_address") is not None
    by_runner = [worker for worker in workers if not worker.runners or not runner or runner in worker.runners.split()]
    able = [
        worker for worker in by_runner if not worker.devices or not kind or is_elsewhere or kind in worker.devices.split()
    ]  # fmt: skip
    count = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
    if not by_runner:
        return f"none of {count} takes jobs of the runner {runner}; start one with `autotune worker --runner {runner}`"
    if not able:
        return f"none of {count} has {kind} devices; start `autotune worker` on a machine that has them"
    if all(worker.job_id for worker in able):
        return f"waits for a worker: all {len(able)} that can run it have a job"
    return "waits for a worker"
