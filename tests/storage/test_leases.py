"""Who holds a job, on every backend; telling a dead process from a live one."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage import leases
from storage.errors import LeaseHeldError, LeaseLostError, UnknownJobError
from storage.leases import current_owner, is_dead
from storage.records import AttemptState, Lease, Owner
from storage.store import Store
from tests.storage.job_steps import ELSEWHERE, attempt, kinds


class TestLeases:
    def test_one_holder_at_a_time(self, store: Store, lease: Lease) -> None:
        assert store.jobs.get(lease.job_id).state is JobState.RUNNING
        assert store.jobs.get(lease.job_id).owner == current_owner()
        with pytest.raises(LeaseHeldError, match=f"process {current_owner().pid} on"):
            store.jobs.acquire(lease.job_id, ELSEWHERE)

    def test_unknown_jobs_are_not_held(self, store: Store) -> None:
        with pytest.raises(UnknownJobError):
            store.jobs.acquire("nothing", ELSEWHERE)

    def test_another_host_keeps_its_job_until_the_lease_expires(self, store: Store, clock) -> None:
        job_id = store.jobs.create({}).id
        old = store.jobs.acquire(job_id, ELSEWHERE, seconds=30)
        clock.advance(29.9)
        with pytest.raises(LeaseHeldError):
            store.jobs.acquire(job_id, current_owner())
        clock.advance(0.1)
        new = store.jobs.acquire(job_id, current_owner())

        assert new.token > old.token
        assert store.events.of(job_id)[-1].payload["taken_from"]["host"] == "elsewhere"

    @pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"started": 1.0}], ids=["no such process", "pid was used again"])
    def test_a_dead_holder_loses_the_job_at_once(self, store: Store, change: dict[str, float]) -> None:
        job_id = store.jobs.create({}).id
        store.jobs.acquire(job_id, dataclasses.replace(current_owner(), **change), seconds=3600)

        assert store.jobs.acquire(job_id, current_owner()).token == 2

    def test_the_former_holder_can_write_nothing(self, store: Store, clock) -> None:
        job_id = store.jobs.create({}).id
        old = store.jobs.acquire(job_id, ELSEWHERE)
        token = attempt(store, old)
        clock.advance(31)
        store.jobs.acquire(job_id, current_owner())
        before = store.events.of(job_id)
        writes: list[Callable[[], object]] = [
            lambda: store.jobs.heartbeat(old),
            lambda: store.jobs.release(old, JobState.FAILED, "", ""),
            lambda: store.trials.add(old, TrialConfig(zero_stage=3), Purpose.SEARCH),
            lambda: store.attempts.start(old, 0),
            lambda: store.attempts.finish(old, TrialResult(attempt=token, outcome=Outcome.OK)),
            lambda: store.jobs.set_reference_losses(old, (1.0,)),
            lambda: store.events.add(old, "note", {}),
        ]
        for write in writes:
            with pytest.raises(LeaseLostError):
                write()

        assert store.events.of(job_id) == before
        assert len(store.trials.of(job_id)) == 1

    def test_a_lease_that_expired_is_current_until_it_is_taken(self, store: Store, lease: Lease, clock) -> None:
        clock.advance(3600)
        store.events.add(lease, "note", {})

        assert store.jobs.heartbeat(lease).expires > clock.now

    def test_a_released_lease_writes_nothing(self, store: Store, lease: Lease) -> None:
        job = store.jobs.release(lease, JobState.PAUSED, "asked", "stopped \udcff by a person\0")

        assert (job.state, job.reason, job.owner) == (JobState.PAUSED, "asked", None)
        with pytest.raises(LeaseLostError):
            store.events.add(lease, "note", {})

    def test_active_seconds_are_those_in_which_it_was_held(self, store: Store, lease: Lease, clock) -> None:
        clock.advance(10)
        lease = store.jobs.heartbeat(lease, seconds=30)
        clock.advance(5)
        store.events.add(lease, "note", {})
        clock.advance(5)
        store.jobs.release(lease, JobState.PAUSED, "", "")
        clock.advance(1000)  # nobody holds it
        lease = store.jobs.acquire(lease.job_id, current_owner(), seconds=30)
        clock.advance(1000)  # the machine slept: held until the lease's end
        store.jobs.heartbeat(lease)

        assert store.jobs.get(lease.job_id).active_seconds == pytest.approx(20 + 30)

    def test_a_clock_set_back_takes_no_seconds_away(self, store: Store, lease: Lease, clock) -> None:
        clock.advance(-100)
        store.jobs.heartbeat(lease)

        assert store.jobs.get(lease.job_id).active_seconds == 0.0

    def test_attempts_of_the_former_holder_are_abandoned(self, store: Store, clock) -> None:
        job_id = store.jobs.create({}).id
        token = attempt(store, store.jobs.acquire(job_id, ELSEWHERE))
        clock.advance(31)
        lease = store.jobs.acquire(job_id, current_owner())

        assert [a.state for a in store.attempts.of(job_id)] == [AttemptState.ABANDONED]
        assert "attempt_abandoned" in kinds(store, job_id)
        assert not store.attempts.finish(lease, TrialResult(attempt=token, outcome=Outcome.OK))
        assert store.attempts.of(job_id)[0].state is AttemptState.SUPERSEDED
        assert store.trials.of(job_id)[0].outcome is None

    def test_release_abandons_what_still_runs(self, store: Store, lease: Lease) -> None:
        attempt(store, lease)
        store.jobs.release(lease, JobState.PAUSED, "", "")

        assert [a.state for a in store.attempts.of(lease.job_id)] == [AttemptState.ABANDONED]


def test_this_process_lives() -> None:
    assert not is_dead(current_owner())
    assert current_owner() == current_owner()


def test_nothing_is_known_of_another_host() -> None:
    assert not is_dead(Owner(host="elsewhere", pid=2**22 + 1, started=1.0))


def test_a_process_that_ended_is_dead_before_it_is_reaped_and_after() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    ended = dataclasses.replace(current_owner(), pid=process.pid, started=0.0)
    assert process.stdout is not None
    process.stdout.read()  # to its end: the process exits
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert is_dead(ended)
    process.communicate()
    assert is_dead(ended)


def test_a_pid_that_another_process_has_now() -> None:
    assert is_dead(dataclasses.replace(current_owner(), started=current_owner().started - 1))
    assert not is_dead(dataclasses.replace(current_owner(), started=0.0))


def test_a_process_that_the_system_hides_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = current_owner()
    monkeypatch.setattr(leases, "_look_up", lambda pid: None)
    assert not is_dead(owner)


def test_the_same_name_in_another_container_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = current_owner()
    monkeypatch.setattr(leases, "_INITIAL_PID_NAMESPACE", "pid:[1]")
    assert current_owner().host != owner.host or "/" in owner.host
