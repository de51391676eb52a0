"""Jobs that are stopped or interrupted, and those whose runner breaks: what is left, and how they go on."""

from pathlib import Path

import pytest
import table
from played import run

from autotune.loop.listener import LoopListener, StopSignal
from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.request.rows import request_to_row
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import JobState
from search_spaces.trial import TrialRequest
from storage.records import JobRecord, TrialRecord
from storage.store import Store

NAMES = ("random", "grid", "tpe")


class StopAfter(LoopListener):
    """Wishes an end when a number of trials has ended, or right when the next has started."""

    def __init__(self, stop: StopSignal, trials: int, wishes: int = 1) -> None:
        self.stop, self.trials, self.wishes = stop, trials, wishes
        self.ended = 0

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        self.ended += 1
        if self.wishes == 1 and self.ended == self.trials:
            self.stop.request()

    def on_start(self, trial: TrialRecord) -> None:
        if self.wishes == 2 and self.ended == self.trials:
            self.stop.request()
            self.stop.request()


@pytest.mark.prove(every=6)
@pytest.mark.parametrize("wishes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_job_is_paused_and_goes_on(tmp_path: Path, store: Store, name: str, wishes: int) -> None:
    session = table.session(tmp_path, strategy=name, trials=10)
    unbroken = run(session, store)
    stop = StopSignal()
    snapshot = run(session, store, stop=stop, listener=StopAfter(stop, 3, wishes))
    assert snapshot.job.state is JobState.PAUSED
    assert len([trial for trial in snapshot.trials if trial.outcome]) == 3
    run_job(session, store, snapshot.job.id, table.runner())
    resumed = read_snapshot(store, snapshot.job.id)
    assert resumed.job.state is JobState.SUCCEEDED
    assert [(t.config, t.purpose, t.repeat) for t in resumed.trials] == [
        (t.config, t.purpose, t.repeat) for t in unbroken.trials
    ]


def test_an_error_of_the_runner_leaves_the_job_failed_and_resumable(tmp_path: Path, store: Store) -> None:
    class Broken(ReplayRunner):
        def submit(self, request: TrialRequest) -> str:
            raise RuntimeError("no room for the ranks")

    session = table.session(tmp_path)
    job = store.jobs.create(request_to_row(session.request))
    with pytest.raises(RuntimeError, match="no room"):
        run_job(session, store, job.id, Broken({}))
    assert (store.jobs.get(job.id).state, store.jobs.get(job.id).message) == (JobState.FAILED, "no room for the ranks")
    finished: JobRecord = run_job(session, store, job.id, table.runner())
    assert finished.state is JobState.SUCCEEDED


def test_a_keyboard_interrupt_leaves_the_job_paused(tmp_path: Path, store: Store) -> None:
    class Interrupted(LoopListener):
        def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
            raise KeyboardInterrupt

    session = table.session(tmp_path)
    job = store.jobs.create(request_to_row(session.request))
    with pytest.raises(KeyboardInterrupt):
        run_job(session, store, job.id, table.runner(), listener=Interrupted())
    assert store.jobs.get(job.id).state is JobState.PAUSED
