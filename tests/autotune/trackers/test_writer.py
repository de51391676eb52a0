"""Trackers that a test makes: what they get, when, and that a broken one neither ends nor slows the sweep."""

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import table
from played import run

from autotune.errors import MissingPackageError, RequestError
from autotune.loop.listener import StopSignal
from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import read_snapshot
from autotune.request.component_names import TRACKERS
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import prepare
from autotune.trackers import writer
from autotune.trackers.tracker import TrackedJob, TrackedSummary, TrackedTrial, Tracker
from search_spaces import plugins
from search_spaces.outcome import JobState
from storage.records import Ask
from storage.store import Store


class Memory(Tracker):
    """Keeps what it gets, for all jobs."""

    trials: dict[str, list[TrackedTrial]]
    summaries: dict[str, list[TrackedSummary]]
    closed: int
    threads: set[str]

    def __init__(self, job: TrackedJob) -> None:
        self.job = job

    def recorded_trials(self) -> Collection[int]:
        return [trial.number for trial in self.trials.get(self.job.id, [])]

    def log_trial(self, trial: TrackedTrial) -> None:
        self.threads.add(threading.current_thread().name)
        self.trials.setdefault(self.job.id, []).append(trial)

    def log_summary(self, summary: TrackedSummary) -> None:
        self.summaries.setdefault(self.job.id, []).append(summary)

    def close(self) -> None:
        type(self).closed += 1


class Raises(Memory):
    """Its server is away."""

    def log_trial(self, trial: TrackedTrial) -> None:
        raise ConnectionError("no server\nat https://example.com")


class Hangs(Memory):
    """Its server does not answer until the test ends."""

    release = threading.Event()

    def log_trial(self, trial: TrackedTrial) -> None:
        self.release.wait()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The trackers of this file as plug-ins."""
    for kind in (Memory, Raises, Hangs):
        kind.trials, kind.summaries, kind.closed, kind.threads = {}, {}, 0, set()
    Hangs.release.clear()
    made: dict[str, Callable[[TrackedJob], Tracker]] = {"memory": Memory, "raises": Raises, "hangs": Hangs}
    monkeypatch.setattr("autotune.request.component_names.plugin_names", lambda group: tuple(made))
    monkeypatch.setattr("autotune.request.component_names.load_plugin", lambda group, name: made[name])
    monkeypatch.setattr("autotune.trackers.writer.load_plugin", lambda group, name: made[name])
    yield
    Hangs.release.set()


def test_every_trial_and_a_summary(tmp_path: Path, store: Store, installed: None) -> None:
    session = table.session(tmp_path, trackers=("memory",), tags=("a",), name="mine", racing=False)
    snapshot = run(session, store)
    job = snapshot.job.id
    logged = Memory.trials[job]
    assert [trial.number for trial in logged] == [trial.number for trial in snapshot.trials]
    assert {trial.purpose for trial in logged} >= {"search", "confirm"}
    whole = snapshot.whole(snapshot.trials[0]).result
    assert whole is not None and whole.samples_per_second is not None
    first = logged[0]
    assert first.curves["loss"] == whole.losses and first.curves["step_seconds"] == whole.step_seconds
    assert first.curves["rank_peak_memory_bytes"] == tuple(rank.peak_memory_bytes for rank in whole.ranks)
    assert first.figures["samples_per_second"] == whole.samples_per_second.mean
    assert first.figures["memory_bytes/parameters"] == whole.ranks[0].memory_by_tag["parameters"]
    assert first.config == snapshot.trials[0].config.every_value()
    (summary,) = Memory.summaries[job]
    assert [row[0] for row in summary.rows] == [trial.number for trial in snapshot.trials]
    assert summary.figures["best_trial"] == snapshot.job.answer["trial"]  # type: ignore[index]
    assert set(summary.columns) > {"micro_batch_size", "zero_stage"} and "offload_param" not in summary.columns
    assert Memory.closed == 1
    assert Memory.threads == {"tracker-memory"}, "not the loop's thread"


def test_a_resumed_job_is_completed_and_nothing_is_written_twice(tmp_path: Path, store: Store, installed: None) -> None:
    session = table.session(tmp_path, trackers=("memory",), trials=5, confirm_repeats=0)
    job = store.jobs.create(request_to_row(session.request)).id
    stop = StopSignal()
    stop.request()
    assert run_job(session, store, job, table.runner(), stop).state is JobState.PAUSED
    run_job(session, store, job, table.runner())
    numbers = [trial.number for trial in read_snapshot(store, job).trials]
    assert [trial.number for trial in Memory.trials[job]] == numbers
    lost = Memory.trials[job].pop(1)  # the process was killed after the trial, and before the tracker wrote it
    store.queue.ask(job, Ask.RESUME, {"trials": 7}, for_worker=False)
    run_job(prepare(table.request(tmp_path, trackers=("memory",), trials=7, confirm_repeats=0)), store, job, table.runner())
    logged = [trial.number for trial in Memory.trials[job]]
    assert lost.number in logged
    assert sorted(logged) == [trial.number for trial in read_snapshot(store, job).trials]
    assert len(Memory.summaries[job]) == 3


def test_a_tracker_that_raises_is_one_line(
    tmp_path: Path, store: Store, installed: None, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = run(table.session(tmp_path, trackers=("raises", "memory")), store)
    assert snapshot.job.state is JobState.SUCCEEDED
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == (
        "tracker raises: ConnectionError: no server at https://example.com; it is left out, and the sweep is not affected"
    )
    assert Raises.closed == 1
    assert len(Memory.trials[snapshot.job.id]) == len(snapshot.trials), "the other one has everything"


def test_a_tracker_that_hangs_does_not_keep_the_sweep(
    tmp_path: Path, store: Store, installed: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(writer, "MOST_WAITING", 3)
    snapshot = run(table.session(tmp_path, trackers=("hangs",), trials=12, racing=False), store)
    assert snapshot.job.state is JobState.SUCCEEDED
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("tracker hangs: ") and line.endswith("; it is left out, and the sweep is not affected")
    assert not Hangs.summaries


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_library_is_the_line_to_type(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.request.component_names.has", lambda _: False)
    with pytest.raises(MissingPackageError) as refused:
        table.session(tmp_path, trackers=(name,))
    assert str(refused.value) == f"tracker {name}: is not installed; pip install 'autotune-parallel[{name}]'"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["wand"], "trackers: 'wand' is not known; use one of wandb, mlflow, tensorboard"),
        (["mlflow", "mlflow"], "trackers: mlflow is given twice; leave one of them out"),
    ],
)
def test_wrong_names_are_refused(given: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_found", dict)
    with pytest.raises(RequestError) as refused:
        request_from_fields({"model": "llama-tiny", "trackers": given})
    assert str(refused.value) == line


def test_one_name_without_a_list_is_one_tracker() -> None:
    assert request_from_fields({"model": "llama-tiny", "trackers": "mlflow"}).trackers == ("mlflow",)
