"""Why a queued job has not started."""

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import pytest

from autotune.outcome.waiting import waiting_text
from search_spaces.outcome import JobState
from storage.records import JobRecord, Submission
from storage.service_records import WorkerRecord
from storage.store import open_store

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def worker(**changes: object) -> WorkerRecord:
    record = WorkerRecord(id="a", host="h", pid=1, started=NOW, seen=NOW, job_id=None, runner="", problem="")
    return dataclasses.replace(record, **changes)


@pytest.fixture
def job(tmp_path: Path) -> JobRecord:
    request = {"runner": "local", "resolved_cluster": {"device": {"kind": "cuda"}}}
    with open_store(str(tmp_path / "jobs.db")) as store:
        return store.queue.submit(request, Submission())[0]


def test_a_job_that_no_worker_can_run_says_why(job: JobRecord) -> None:
    assert waiting_text(job, []).startswith("no worker runs; ")
    assert waiting_text(job, [worker(devices="cpu")]).startswith("none of 1 worker has cuda devices; ")
    assert waiting_text(job, [worker(runners="ray"), worker(runners="ray")]).startswith("none of 2 workers takes jobs of the ")
    busy = worker(devices="cpu cuda", job_id="20260101-000000-abcd")
    assert waiting_text(job, [busy, worker(devices="cpu")]) == "waits for a worker: all 1 that can run it have a job"
    assert waiting_text(job, [busy, worker()]) == "waits for a worker"
    elsewhere = dataclasses.replace(job, request={**job.request, "ray_address": "auto"})
    assert waiting_text(elsewhere, [worker(devices="cpu")]) == "waits for a worker"
    assert waiting_text(dataclasses.replace(job, state=JobState.RUNNING), []) == ""
