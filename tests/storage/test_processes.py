"""Several processes on one database: killed at any point, and racing for one job."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from search_spaces.outcome import JobState
from storage.errors import LeaseHeldError
from storage.leases import current_owner
from storage.store import open_store
from tests.storage.whole import check_whole, every_event

ROUNDS = 8


@pytest.mark.prove(every=2)
def test_a_writer_killed_at_any_point_leaves_nothing_half_written(address: str, workers: Callable) -> None:
    with open_store(address) as store, workers() as tell:
        job_id = store.jobs.create({}).id
        for number in range(ROUNDS):
            before = len(store.trials.of(job_id))
            pid = int(tell(f"start sweep {address} {job_id}"))
            # Every other one is killed in the midst of its work, however slow the machine is; the rest wherever they are.
            deadline = time.monotonic() + 120
            while number % 2 and len(store.trials.of(job_id)) == before:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(random.uniform(0.0, 0.25))
            os.kill(pid, signal.SIGKILL)
            check_whole(store, job_id, address)
        assert int(tell("wait")) == ROUNDS
        assert len(store.trials.of(job_id)) >= ROUNDS // 2
        # The last holder's lease has an hour to go, but it is dead.
        store.jobs.release(store.jobs.acquire(job_id, current_owner()), JobState.PAUSED, "", "")
        check_whole(store, job_id, address)


@pytest.mark.prove
def test_processes_that_share_a_job_never_hold_it_together(address: str, workers: Callable) -> None:
    with open_store(address) as store, workers() as tell:
        job_id = store.jobs.create({}).id
        pids = {int(tell(f"start share {address} {job_id}")) for _ in range(4)}
        assert tell("wait") == "0"
        events = every_event(store, job_id)[1:]

    assert [event.sequence for event in events] == list(range(2, 2 + 4 * 10 * 5))
    for first in range(0, len(events), 5):
        held = events[first : first + 5]
        assert [event.kind for event in held] == ["job_acquired", "note", "note", "note", "job_released"]
        assert {event.payload["pid"] for event in held[1:4]} == {held[0].payload["owner"]["pid"]}
    assert {event.payload["pid"] for event in events if event.kind == "note"} == pids


@pytest.mark.prove(every=2)
def test_a_live_holder_keeps_the_job_and_a_killed_one_loses_it_at_once(address: str, workers: Callable) -> None:
    with open_store(address) as store, workers() as tell:
        job_id = store.jobs.create({}).id
        pid = int(tell(f"start hold {address} {job_id}"))
        while store.jobs.get(job_id).owner is None:
            time.sleep(0.01)
        with pytest.raises(LeaseHeldError, match=str(pid)):
            store.jobs.acquire(job_id, current_owner())
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while True:  # the kernel takes a moment; its parent has not reaped it
            try:
                assert store.jobs.acquire(job_id, current_owner()).token == 2
                break
            except LeaseHeldError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        tell("wait")


@pytest.mark.prove
def test_a_new_file_is_opened_by_many_at_once(address: str, workers: Callable) -> None:
    if address.startswith("sqlite"):
        Path(address.removeprefix("sqlite:///")).unlink()
    with workers() as tell:
        for _ in range(6):
            tell(f"start look {address} -")
        assert tell("wait") == "0"
