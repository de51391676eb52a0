"""The contract of `Tracker`, for each tracker with its library: what was written is read back through that library."""

import importlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import table
from swept import measured
from trackers import read_back
from trackers.read_back import ReadJob

from autotune.loop.listener import LoopListener, StopSignal
from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.request.component_names import TRACKERS
from autotune.request.rows import request_to_row
from search_spaces.outcome import JobState, Outcome
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore")
"""Warnings of the libraries about one another."""

READERS: dict[str, Callable[[Path, str], ReadJob]] = {
    "wandb": read_back.of_wandb,
    "mlflow": lambda folder, job: read_back.of_mlflow(f"sqlite:///{folder}/mlflow.db", job),
    "tensorboard": read_back.of_tensorboard,
}


@pytest.fixture(params=TRACKERS)
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each tracker, in a folder of its own and without a server."""
    name: str = request.param
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'autotune-parallel[{name}]'")
    settle(tmp_path, monkeypatch)
    return name


def settle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)


class StopAfter(LoopListener):
    """Pauses the job after some trials."""

    def __init__(self, stop: StopSignal, trials: int) -> None:
        self._stop, self._left = stop, trials

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        self._left -= 1
        if self._left == 0:
            self._stop.request()


def failing(config: TrialConfig) -> Any:
    """As `measured`; the highest stage fails."""
    return table.ended(Outcome.FAILED, "an error | of a rank") if config.zero_stage == 3 else measured(config)


def test_a_run_for_each_trial_once_over_a_pause_and_a_summary(tracker: str, tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trackers=(tracker,), trials=6, racing=False, confirm_repeats=0, memory_limit=30_000_000)
    job = store.jobs.create(request_to_row(session.request)).id
    stop = StopSignal()
    paused = run_job(session, store, job, table.runner(failing), stop, StopAfter(stop, 3))
    assert paused.state is JobState.PAUSED
    first = READERS[tracker](tmp_path, job)
    assert first.summaries == 1
    assert 3 <= len(first.runs) < 6
    session = replace(session, request=replace(session.request, name="renamed while it was paused"))
    store.queue.change_request(job, None, {"name": session.request.name})
    assert run_job(session, store, job, table.runner(failing)).state is JobState.SUCCEEDED

    snapshot = read_snapshot(store, job)
    read = READERS[tracker](tmp_path, job)
    assert read.numbers == [trial.number for trial in snapshot.trials], "each once"
    assert {trial.outcome for trial in snapshot.trials} >= {Outcome.OK, Outcome.FAILED}
    for trial in snapshot.trials:
        whole, run = snapshot.whole(trial), read.run(trial.number)
        assert whole.result is not None
        assert run.outcome == trial.outcome
        assert run.failed == (trial.outcome is Outcome.FAILED)
        assert run.config.items() >= read_back.texts(trial.config.every_value()).items()
        assert run.config["global_batch_size"] == "8"
        assert run.curves.get("step_seconds", []) == pytest.approx(list(whole.result.step_seconds), rel=1e-6)
        assert run.curves.get("loss", []) == pytest.approx(list(whole.result.losses))
        assert run.curves.get("rank_peak_memory_bytes", []) == pytest.approx(
            [rank.peak_memory_bytes for rank in whole.result.ranks]
        )
        rate = whole.result.samples_per_second
        assert run.figures.get("samples_per_second") == (pytest.approx(rate.mean, rel=1e-6) if rate else None)
        assert run.figures.get("peak_memory_bytes") == (whole.result.peak_memory_bytes if rate else None)
    assert read.summaries == 1, "replaced"
    assert snapshot.job.answer is not None
    assert read.figures["best_trial"] == snapshot.job.answer["trial"]
    assert read.figures["best_samples_per_second"] == pytest.approx(snapshot.job.answer["rate"]["mean"], rel=1e-6)
    for word in (
        "zero_stage",
        "micro_batch_size",
        "samples_per_second",
        "an error",
        *map(str, (t.number for t in snapshot.trials)),
    ):
        assert word in read.table


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """A server of MLflow on this machine."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    if importlib.util.find_spec("flask") is None:
        pytest.skip("the package mlflow-skinny has no server: pip install mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    where = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "artifacts")]
    log = (tmp_path / "server.log").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words, *where], cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
    )
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)
        log.close()


def test_through_a_server_of_mlflow(mlflow_server: str, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    session = table.session(tmp_path, trackers=("mlflow",), trials=2, confirm_repeats=0)
    job = store.jobs.create(request_to_row(session.request)).id
    run_job(session, store, job, table.runner())
    read = read_back.of_mlflow(mlflow_server, job)
    assert read.numbers == [trial.number for trial in read_snapshot(store, job).trials]
    assert "samples_per_second" in read.table


def test_a_real_sweep_with_every_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRACKERS:
        pytest.importorskip(name, reason=f"{name} is not installed")
    settle(tmp_path, monkeypatch)
    words = (
        *("sweep", "llama-tiny", "--runner", "local", "--ranks", "1", "--trials", "2", "--confirm-repeats", "0", "--json"),
        *("--global-batch-size", "2", "--sequence-length", "16", "--trial-seconds", "0.5", "--strategy", "random"),
        *(word for name in TRACKERS for word in ("--tracker", name)),
    )
    environment = os.environ | {"AUTOTUNE_DB": str(tmp_path / "jobs.db"), "PYTHONPATH": os.pathsep.join(sys.path)}
    swept = subprocess.run(
        [sys.executable, "-c", "from autotune.cli import main; main()", *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert swept.returncode == 0, swept.stderr
    assert "is left out" not in swept.stderr
    from storage.store import open_store

    with open_store(str(tmp_path / "jobs.db")) as opened:
        snapshot = read_snapshot(opened, "latest")
        for name in TRACKERS:
            read = READERS[name](tmp_path, snapshot.job.id)
            assert read.numbers == [trial.number for trial in snapshot.trials], name
            assert read.summaries == 1
            for trial in snapshot.trials:
                result = snapshot.whole(trial).result
                assert result is not None
                assert read.run(trial.number).curves["step_seconds"] == pytest.approx(list(result.step_seconds), rel=1e-6)
                assert read.run(trial.number).curves["loss"] == pytest.approx(list(result.losses), rel=1e-6)
