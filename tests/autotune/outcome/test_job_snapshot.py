"""The snapshot: what is closed is read once, and a snapshot stays what it was when it was read."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.objective.intervals import Repeat, Spread, pooled_spread
from autotune.outcome.job_snapshot import SnapshotReader, read_snapshot
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.records import Lease
from storage.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "jobs.db")) as store:
        yield store


@pytest.fixture
def lease(store: Store) -> Lease:
    return store.jobs.acquire(store.jobs.create({}).id, current_owner())


def config(number: int) -> TrialConfig:
    return TrialConfig(micro_batch_size=1 + number)


def measure(store: Store, lease: Lease, number: int, rate: float = 10.0) -> None:
    token = store.attempts.start(lease, number).token
    interval = Interval(mean=rate, low=rate, high=rate)
    store.attempts.finish(
        lease, TrialResult(attempt=token, outcome=Outcome.OK, samples_per_second=interval, losses=(1.0, 2.0))
    )  # fmt: skip


def test_snapshots_of_one_reader_are_those_that_are_read_afresh_and_old_ones_stay(store: Store, lease: Lease) -> None:
    reader = SnapshotReader(store, lease.job_id)
    for number in range(4):
        store.trials.add(lease, config(number), Purpose.SEARCH)
    store.trials.add(lease, config(0), Purpose.CONFIRM, repeat=1)
    seen = []
    # Out of order: trial 1 is closed after 2 and 3.
    for number in (0, 2, 3, 4, 1):
        measure(store, lease, number, rate=10.0 + number)
        snapshot = reader.read()
        seen.append(
            (snapshot, snapshot.trials, snapshot.searched, snapshot.spent, snapshot.open, snapshot.confirmations(config(0)))
        )
        fresh = read_snapshot(store, lease.job_id)
        assert (snapshot.trials, snapshot.searched, snapshot.spent) == (fresh.trials, fresh.searched, fresh.spent)
        assert [trial.number for trial in snapshot.searched] == [
            t.number for t in snapshot.trials if t.outcome and t.number < 4
        ]
        assert snapshot.spread(Spread()) == fresh.spread(Spread())
        assert [snapshot.trial(place).number for place in range(5)] == list(range(5))
    for snapshot, trials, searched, spent, still_open, confirmations in seen:
        assert (snapshot.trials, snapshot.searched, snapshot.spent, snapshot.open) == (trials, searched, spent, still_open)
        assert snapshot.confirmations(config(0)) == confirmations
    groups = [[Repeat(rate=10.0, within=0.0), Repeat(rate=14.0, within=0.0)]]
    assert seen[-1][0].spread(Spread()) == pooled_spread(groups, Spread())
    assert seen[-1][0].search_trial(config(9)) is None


def test_what_is_closed_is_read_once(store: Store, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        store.trials.add(lease, config(number), Purpose.SEARCH)
    asked: list[int] = []
    real = store.trials.figures_of
    monkeypatch.setattr(store.trials, "figures_of", lambda job, first=0: asked.append(first) or real(job, first))
    reader = SnapshotReader(store, lease.job_id)
    for number in range(3):
        reader.read()
        measure(store, lease, number)
    reader.read()
    reader.read()
    assert asked == [0, 0, 1, 2, 3]


def test_a_snapshot_has_figures_and_reads_the_whole_result_when_it_is_asked_for(store: Store, lease: Lease) -> None:
    store.trials.add(lease, config(0), Purpose.SEARCH)
    measure(store, lease, 0)
    snapshot = read_snapshot(store, lease.job_id)
    [trial] = snapshot.trials
    assert trial.result is not None
    assert (trial.result.losses, trial.result.attempt) == ((), "")
    whole = snapshot.whole(trial)
    assert whole.result is not None
    assert whole.result.losses == (1.0, 2.0)
    assert dataclasses.replace(whole, result=trial.result) == trial
