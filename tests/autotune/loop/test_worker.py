"""Workers: jobs from the queue, one after another; what people ask of them; what dies is taken over."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import table

from autotune.errors import RequestError
from autotune.loop.listener import StopSignal
from autotune.loop.worker import Worker
from autotune.request.rows import request_to_row
from autotune.session.session import Session
from executor.errors import RunnerError
from executor.runners.replay import ReplayRunner
from executor.runners.runner import Runner
from search_spaces.models.command import CommandModel
from search_spaces.outcome import JobState, Outcome
from search_spaces.trial import TrialRequest
from storage.leases import current_owner
from storage.records import Ask, AttemptState, Owner, Submission
from storage.store import Store


def submit(store: Store, folder: Path, **changes: object) -> str:
    return store.queue.submit(request_to_row(table.session(folder, **changes).request), Submission())[0].id


def make() -> object:
    return lambda _session: table.runner()


def until(condition, seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


class Running:
    """A worker in a thread."""

    def __init__(self, store: Store, seconds: float) -> None:
        self.stop = StopSignal()
        self.ranks = table.runner(seconds_per_trial=seconds)
        self.worker = Worker(store, lambda _session: self.ranks, poll_seconds=0.02)
        self._thread = threading.Thread(target=self.worker.run, args=(self.stop,))

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.request()
        self.stop.request()
        self._thread.join(120)
        assert not self._thread.is_alive()


@pytest.mark.prove
def test_jobs_are_run_one_after_another(store: Store, tmp_path: Path) -> None:
    ids = [submit(store, tmp_path, seed=seed) for seed in range(3)]
    Worker(store, make(), poll_seconds=0.02).run(StopSignal(), most_jobs=3)
    jobs = [store.jobs.get(job_id) for job_id in ids]
    assert [(job.state, job.reason, job.owner) for job in jobs] == [(JobState.SUCCEEDED, "BUDGET", None)] * 3
    assert all(sum(trial.counted for trial in store.trials.of(job.id)) == 6 for job in jobs)


@pytest.mark.prove
def test_ranks_stay_warm_while_jobs_need_the_same(store: Store, tmp_path: Path) -> None:
    made: list[Runner] = []

    def counted(_session: Session) -> Runner:
        made.append(table.runner())
        return made[-1]

    for ranks in (2, 2, 1):
        submit(store, tmp_path, ranks=ranks, trials=1)
    (tmp_path / "train.py").touch()
    script = CommandModel(arguments=("python", "train.py", "{micro_batch_size}"), folder=str(tmp_path))
    submit(store, tmp_path, ranks=1, trials=1, model=script.name, command=script, engine="command")
    Worker(store, counted).run(StopSignal(), most_jobs=4)
    assert len(made) == 3


def test_ranks_that_do_not_start_fail_the_job_and_not_the_worker(store: Store, tmp_path: Path) -> None:
    first, second = submit(store, tmp_path), submit(store, tmp_path, seed=1)
    runners = iter([RequestError("runner", "does not start", "mend it"), table.runner()])

    def make_runner(_session: Session) -> Runner:
        runner = next(runners)
        if isinstance(runner, Exception):
            raise runner
        return runner

    Worker(store, make_runner).run(StopSignal(), most_jobs=2)
    failed = store.jobs.get(first)
    assert (failed.state, failed.message) == (JobState.FAILED, "runner: does not start; mend it")
    assert store.jobs.get(second).state is JobState.SUCCEEDED


class Breaking(ReplayRunner):
    """Ranks that cannot be started any more after the first trial."""

    def submit(self, request: TrialRequest) -> str:
        if self._ran:
            raise RunnerError("the Ray actors of the ranks did not come up")
        self._ran = True
        return super().submit(request)

    _ran = False


def broken() -> Runner:
    return Breaking(table.measured)


def unstartable() -> Runner:
    raise RunnerError("Ray does not start")


@pytest.mark.prove(every=6)
@pytest.mark.parametrize(
    ("ranks", "state", "abandoned"),
    [
        ([broken, table.runner], JobState.SUCCEEDED, 1),
        ([unstartable, unstartable, table.runner], JobState.SUCCEEDED, 0),
        ([broken, unstartable, table.runner], JobState.SUCCEEDED, 1),
        ([broken, broken, broken], JobState.FAILED, 3),
        ([broken, unstartable, unstartable], JobState.FAILED, 1),
        ([unstartable, unstartable, broken], JobState.FAILED, 1),
    ],
)
def test_ranks_that_break_are_made_anew_a_few_times(
    store: Store, tmp_path: Path, ranks: list[Callable[[], Runner]], state: JobState, abandoned: int
) -> None:
    job_id, other = submit(store, tmp_path), submit(store, tmp_path, seed=1)
    makers = iter([*ranks, table.runner])
    Worker(store, lambda _session: next(makers)()).run(StopSignal(), most_jobs=2)
    assert (store.jobs.get(job_id).state, store.jobs.get(job_id).owner) == (state, None)
    assert sum(a.state is AttemptState.ABANDONED for a in store.attempts.of(job_id)) == abandoned
    assert store.jobs.get(other).state is JobState.SUCCEEDED
    if state is JobState.SUCCEEDED:
        assert sum(trial.counted for trial in store.trials.of(job_id)) == 6
    else:
        assert store.jobs.get(job_id).reason == "RunnerError"


def test_a_row_that_cannot_be_read_fails_the_job_alone(store: Store, tmp_path: Path) -> None:
    broken = store.queue.submit({"model": "llama-tiny", "trials": "many"}, Submission())[0].id
    good = submit(store, tmp_path, trials=1)
    Worker(store, make()).run(StopSignal(), most_jobs=2)
    assert store.jobs.get(broken).state is JobState.FAILED
    assert store.jobs.get(good).state is JobState.SUCCEEDED


@pytest.mark.prove
@pytest.mark.parametrize(
    ("wanted", "state", "killed"),
    [(Ask.PAUSE, JobState.PAUSED, False), (Ask.STOP, JobState.SUCCEEDED, False), (Ask.CANCEL, JobState.CANCELLED, True)],
)
def test_what_is_asked_of_a_running_job(
    store: Store, tmp_path: Path, wanted: Ask, state: JobState, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.loop.heartbeats.BEAT_SECONDS", 0.05)
    job_id = submit(store, tmp_path)
    with Running(store, seconds=600.0 if killed else 1.5) as running:
        until(lambda: store.attempts.of(job_id))
        store.queue.ask(job_id, wanted)
        until(lambda: store.jobs.get(job_id).owner is None)
        job = store.jobs.get(job_id)
        running.ranks._seconds = 0.0
        other = submit(store, tmp_path, seed=3, trials=1)
        until(lambda: store.jobs.get(other).state is JobState.SUCCEEDED)
    assert job.state is state
    open_trials = [trial for trial in store.trials.of(job_id) if trial.outcome is None]
    assert bool(open_trials) == killed
    if wanted is Ask.PAUSE:
        store.queue.ask(job_id, Ask.RESUME)
        Worker(store, make()).run(StopSignal(), most_jobs=1)
        assert store.jobs.get(job_id).reason == "BUDGET"


@pytest.mark.prove
def test_a_worker_that_ends_gives_its_job_back(store: Store, tmp_path: Path) -> None:
    job_id = submit(store, tmp_path)
    with Running(store, seconds=1.0) as running:
        until(lambda: running.ranks._running)  # with the time that it takes: an attempt is written before it is submitted
        running.ranks._seconds = 600.0  # those that are begun from here on do not end by themselves
        until(lambda: len(store.attempts.of(job_id)) > 1)
    job = store.jobs.get(job_id)
    assert (job.state, job.owner) == (JobState.QUEUED, None)
    Worker(store, make()).run(StopSignal(), most_jobs=1)
    assert store.jobs.get(job_id).state is JobState.SUCCEEDED
    assert sum(trial.counted for trial in store.trials.of(job_id)) == 6


def test_what_a_dead_worker_left_goes_on(store: Store, tmp_path: Path) -> None:
    job_id = submit(store, tmp_path)
    dead = Owner(host=current_owner().host, pid=2**22 + 1, started=1.0)
    lease = store.queue.claim(dead)
    assert lease is not None
    Worker(store, make()).run(StopSignal(), most_jobs=1)
    job = store.jobs.get(job_id)
    assert (job.state, job.reason) == (JobState.SUCCEEDED, "BUDGET")
    assert {trial.outcome for trial in store.trials.of(job_id)} == {Outcome.OK}


def test_a_budget_that_is_extended_just_before_the_end_is_spent(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store, tmp_path)
    release = store.jobs.release

    def extended(*arguments: object) -> object:
        if "trials" not in changed:
            changed["trials"] = 9
            store.queue.change_request(job_id, None, changed)
        return release(*arguments)

    changed: dict[str, int] = {}
    monkeypatch.setattr(store.jobs, "release", extended)
    Worker(store, make()).run(StopSignal(), most_jobs=1)
    job = store.jobs.get(job_id)
    assert (job.state, job.reason, job.request["trials"]) == (JobState.SUCCEEDED, "BUDGET", 9)
    assert sum(trial.counted for trial in store.trials.of(job_id)) == 9


@pytest.mark.prove
def test_an_extended_budget_is_spent(store: Store, tmp_path: Path) -> None:
    job_id = submit(store, tmp_path)
    with Running(store, seconds=5.0) as running:
        until(lambda: store.attempts.of(job_id))
        store.queue.change_request(job_id, None, {"trials": 9})
        running.ranks._seconds = 0.0
        until(lambda: store.jobs.get(job_id).state is JobState.SUCCEEDED)
    assert sum(trial.counted for trial in store.trials.of(job_id)) == 9
