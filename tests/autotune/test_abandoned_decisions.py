"""A decision that takes long is abandoned when nothing further is to start."""

import dataclasses
import threading
from pathlib import Path

import pytest
import table
from played import run

from autotune.loop.listener import StopSignal
from autotune.strategies.strategy import Strategy
from autotune.strategies.walks import RandomStrategy
from search_spaces.lattice import checkpoint, checkpoints
from search_spaces.outcome import JobState
from storage.records import Ask
from storage.store import Store


class Endless(RandomStrategy):
    """Computes until it is abandoned, from the decision on that has so much history."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.computing = after, threading.Event()

    def propose(self, candidates, history, pending, count, seed):  # type: ignore[no-untyped-def]
        while len(history) >= self.after:
            self.computing.set()
            checkpoint()
        return super().propose(candidates, history, pending, count, seed)


@pytest.mark.parametrize("after", [0, 3])
def test_a_stop_ends_a_decision(tmp_path: Path, store: Store, after: int) -> None:
    strategy, stop = Endless(after), StopSignal()
    wish = threading.Thread(target=lambda: strategy.computing.wait(60) and stop.request())
    wish.start()
    snapshot = run(_session(tmp_path, strategy), store, stop=stop)
    wish.join()
    assert snapshot.job.state is JobState.PAUSED
    assert len([trial for trial in snapshot.trials if trial.outcome]) == after


def test_a_cancel_that_is_written_in_the_database_ends_a_decision(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next heartbeat tells of it."""
    monkeypatch.setattr("autotune.loop.heartbeats.BEAT_SECONDS", 3600.0)
    monkeypatch.setattr("autotune.loop.loop.LOOK_SECONDS", 0.01)
    strategy = Endless(2)

    def cancel() -> None:
        assert strategy.computing.wait(60)
        store.queue.ask(store.jobs.newest()[0].id, Ask.CANCEL)

    wish = threading.Thread(target=cancel)
    wish.start()
    snapshot = run(_session(tmp_path, strategy), store)
    wish.join()
    assert snapshot.job.state is JobState.CANCELLED


def test_nobody_asks_where_nobody_answers() -> None:
    asked = []
    checkpoint()
    with checkpoints(lambda: asked.append(1)):
        checkpoint()
    checkpoint()
    assert asked == [1]


def _session(folder: Path, strategy: Strategy):  # type: ignore[no-untyped-def]
    return dataclasses.replace(table.session(folder, strategy="random", trials=10), strategy=strategy)
