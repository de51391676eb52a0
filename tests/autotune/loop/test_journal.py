"""What a worker tells its operators: logs and spans that name the job and the trial, and signs of life."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import table
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from autotune.errors import RequestError
from autotune.logs import JsonLines, traces
from autotune.loop.heartbeats import WorkerHeartbeat
from autotune.loop.listener import StopSignal
from autotune.loop.worker import Worker
from autotune.request.rows import request_to_row
from executor.errors import RunnerError
from executor.runners.runner import Runner
from search_spaces.outcome import JobState
from storage.records import Submission
from storage.store import Store, open_store

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "jobs.db")) as store:
        yield store


def submit(store: Store, folder: Path) -> str:
    return store.queue.submit(request_to_row(table.session(folder).request), Submission())[0].id


def test_each_line_of_the_log_names_its_job_and_trial(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job_id = submit(store, tmp_path)
    with caplog.at_level(logging.INFO):
        Worker(store, lambda _session: table.runner(), poll_seconds=0.02).run(StopSignal(), most_jobs=1)
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert all(line["job"] == job_id for line in lines)
    trials = [line["trial"] for line in lines if "trial" in line]
    assert sorted(trials) == [trial.number for trial in store.trials.of(job_id)]
    assert lines[-1]["message"] == f"job {job_id}: SUCCEEDED BUDGET"
    assert {"time", "level", "logger"} <= lines[0].keys()


def test_an_error_is_one_line_of_json_with_its_traceback() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "bad %s", ("\n",), sys.exc_info())
    text = JsonLines().format(record)
    assert "\n" not in text
    assert "ValueError: two\nlines" in json.loads(text)["traceback"]


def test_a_worker_is_seen_while_it_lives_and_says_why_ranks_do_not_start(store: Store, tmp_path: Path) -> None:
    job_id = submit(store, tmp_path)
    seen: list[Any] = []

    def make(_session: object) -> Runner:
        seen.append(store.workers.alive())
        raise RunnerError("ray", "no room", "free some")

    worker = Worker(store, make, poll_seconds=0.02)
    worker._heartbeat = WorkerHeartbeat(store, seconds=0.01)
    done = worker._heartbeat.set_runner

    def set_runner(runner: str, problem: str = "") -> None:
        done(runner, problem)
        limit = time.monotonic() + 60.0
        while problem and not any(item.problem for item in store.workers.alive()):
            assert time.monotonic() < limit
            time.sleep(0.01)
        seen.append(store.workers.alive())

    worker._heartbeat.set_runner = set_runner  # type: ignore[method-assign]
    worker.run(StopSignal(), most_jobs=1)
    assert store.jobs.get(job_id).state is JobState.FAILED
    assert (seen[-1][0].pid, seen[-1][0].job_id, seen[-1][0].runner) == (os.getpid(), job_id, "ray")
    assert "no room" in seen[-1][0].problem
    assert store.workers.alive() == []


class Collector:
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                for item in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in item.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)


@pytest.mark.prove
def test_a_collector_is_sent_a_span_for_the_job_and_each_of_its_trials(store: Store, tmp_path: Path) -> None:
    job_id = submit(store, tmp_path)
    collector = Collector()
    thread = Thread(target=collector.server.serve_forever)
    thread.start()
    measured = {
        "outcome": "OK", "losses": [5.0, 4.5], "step_seconds": [0.1] * 5, "within_relative_error": 0.01,
        "samples_per_second": {"mean": 80.0, "low": 79.0, "high": 81.0}, "peak_memory_bytes": 10**6,
    }  # fmt: skip
    (tmp_path / "table.json").write_text(json.dumps({"*": measured}))
    try:
        answer = subprocess.run(
            [sys.executable, "-c", "from autotune.cli import main; main()", "worker", "--replay", "table.json", "--jobs", "1",
             "--db", "jobs.db", "--log-format", "json"],
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
            env=os.environ | {
                "PYTHONPATH": str(ROOT),
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server.server_port}",
            },
        )  # fmt: skip
    finally:
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()
    assert answer.returncode == 0, answer.stderr
    assert all(json.loads(line)["level"] for line in answer.stderr.splitlines())
    (job,) = [span for span in collector.spans if span.name == "job"]
    trials = [span for span in collector.spans if span.name == "trial"]
    assert {span.parent_span_id for span in trials} == {job.span_id}
    about = [{item.key: item.value for item in span.attributes} for span in trials]
    assert {item["autotune.job.id"].string_value for item in about} == {job_id}
    ran = {trial.number for trial in store.trials.of(job_id) if trial.attempts}
    assert {item["autotune.trial.number"].int_value for item in about} == ran
    assert {item["autotune.trial.outcome"].string_value for item in about} == {"OK"}


def test_traces_without_their_packages_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(RequestError, match=r"pip install 'autotune-parallel\[opentelemetry\]'"), traces("x"):
        pass
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    with traces("x") as sent:
        assert not sent
