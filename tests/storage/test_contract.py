"""The contract of `Store`, held against every backend that the `address` fixture names."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import event

from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.plain import to_plain
from search_spaces.trial import CollectiveCount, Interval, RankMeasurement, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.errors import LeaseHeldError, LeaseLostError, UnknownJobError, UnknownTrialError
from storage.owners import current_owner
from storage.records import AttemptState, Lease, Owner
from storage.sql import SqlStore
from storage.store import Store

ELSEWHERE = Owner(host="elsewhere", pid=1, started=1.0)
RANK = RankMeasurement(
    rank=0,
    host="here",
    peak_memory_bytes=2**41,
    memory_by_tag={"parameters": 2**40, "gradients": 2**40},
    tag_peak_bytes={"parameters": 2**40, "gradients": 2**41},
    rss_peak_bytes=2**42,
    cpu_seconds_per_step=0.25,
    collectives=(CollectiveCount(operation="all_gather", mesh_dimension="data", count=3, bytes=12),),
    throttled=False,
)


@pytest.fixture
def lease(store: Store) -> Lease:
    """A job that this process holds."""
    return store.acquire(store.create_job({"model": "m"}).id, current_owner())


def attempt(store: Store, lease: Lease, config: TrialConfig | None = None, purpose: Purpose = Purpose.SEARCH) -> str:
    """Add a trial, start an attempt at it, and return its token."""
    return store.start_attempt(lease, store.add_trial(lease, config or TrialConfig(), purpose).number).token


def kinds(store: Store, job_id: str) -> list[str]:
    return [event.kind for event in store.events(job_id)]


class TestJobs:
    def test_a_new_job_is_queued_and_told(self, store: Store) -> None:
        job = store.create_job({"model": "m", "budget": {"trials": 3}})

        assert (job.state, job.owner, job.active_seconds, job.reference_losses) == (JobState.QUEUED, None, 0.0, ())
        assert store.job(job.id) == job
        assert job.request == {"model": "m", "budget": {"trials": 3}}
        assert kinds(store, job.id) == ["job_created"]

    def test_ids_are_short_and_sort_by_the_second(self, store: Store, clock) -> None:
        ids = []
        for _ in range(3):
            ids.append(store.create_job({}).id)
            clock.advance(1)

        assert ids == sorted(ids)
        assert all(len(job_id) == 20 for job_id in ids)

    def test_the_latest_is_the_default(self, store: Store, clock) -> None:
        store.create_job({})
        clock.advance(0.000001)
        latest = store.create_job({})

        assert store.job() == latest

    def test_a_prefix_names_a_job_that_only_it_fits(self, store: Store, clock) -> None:
        first = store.create_job({})
        clock.advance(3600)
        second = store.create_job({})

        assert store.job(first.id[:12]) == first
        assert store.job(second.id) == second
        for name in (first.id[:8], "20991231", "", "%", first.id + "x"):
            with pytest.raises(UnknownJobError):
                store.job(name)

    def test_no_job_at_all(self, store: Store) -> None:
        with pytest.raises(UnknownJobError, match="autotune sweep"):
            store.job()

    def test_pages_are_newest_first_with_no_gap_and_no_repeat(self, store: Store, clock) -> None:
        created = []
        for index in range(7):
            created.append(store.create_job({}).id)
            clock.advance(index % 2)  # some share a moment
        seen: list[str] = []
        while page := store.jobs(limit=3, before=seen[-1] if seen else None):
            seen += [job.id for job in page]

        assert sorted(seen) == sorted(created)
        assert [store.job(job_id).created for job_id in seen] == sorted((store.job(i).created for i in created), reverse=True)

    def test_deleting_removes_all_that_belongs_to_it(self, store: Store, lease: Lease) -> None:
        store.finish_attempt(lease, TrialResult(attempt=attempt(store, lease), outcome=Outcome.OK, ranks=(RANK,)))
        with pytest.raises(LeaseHeldError):
            store.delete_job(lease.job_id)
        store.release(lease, JobState.PAUSED, "", "")
        store.delete_job(lease.job_id)

        assert (store.jobs(), store.trials(lease.job_id), store.attempts(lease.job_id)) == ([], [], [])
        assert store.events(lease.job_id) == []
        with pytest.raises(UnknownJobError):
            store.delete_job(lease.job_id)


class TestLeases:
    def test_one_holder_at_a_time(self, store: Store, lease: Lease) -> None:
        assert store.job(lease.job_id).state is JobState.RUNNING
        assert store.job(lease.job_id).owner == current_owner()
        with pytest.raises(LeaseHeldError, match=f"process {current_owner().pid} on"):
            store.acquire(lease.job_id, ELSEWHERE)

    def test_unknown_jobs_are_not_held(self, store: Store) -> None:
        with pytest.raises(UnknownJobError):
            store.acquire("nothing", ELSEWHERE)

    def test_another_host_keeps_its_job_until_the_lease_expires(self, store: Store, clock) -> None:
        job_id = store.create_job({}).id
        old = store.acquire(job_id, ELSEWHERE, seconds=30)
        clock.advance(29.9)
        with pytest.raises(LeaseHeldError):
            store.acquire(job_id, current_owner())
        clock.advance(0.1)
        new = store.acquire(job_id, current_owner())

        assert new.token > old.token
        assert store.events(job_id)[-1].payload["taken_from"]["host"] == "elsewhere"

    @pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"started": 1.0}], ids=["no such process", "pid was used again"])
    def test_a_dead_holder_loses_the_job_at_once(self, store: Store, change: dict[str, float]) -> None:
        job_id = store.create_job({}).id
        store.acquire(job_id, dataclasses.replace(current_owner(), **change), seconds=3600)

        assert store.acquire(job_id, current_owner()).token == 2

    def test_the_former_holder_can_write_nothing(self, store: Store, clock) -> None:
        job_id = store.create_job({}).id
        old = store.acquire(job_id, ELSEWHERE)
        token = attempt(store, old)
        clock.advance(31)
        store.acquire(job_id, current_owner())
        before = store.events(job_id)
        writes: list[Callable[[], object]] = [
            lambda: store.heartbeat(old),
            lambda: store.release(old, JobState.FAILED, "", ""),
            lambda: store.add_trial(old, TrialConfig(zero_stage=3), Purpose.SEARCH),
            lambda: store.start_attempt(old, 0),
            lambda: store.finish_attempt(old, TrialResult(attempt=token, outcome=Outcome.OK)),
            lambda: store.set_reference_losses(old, (1.0,)),
            lambda: store.add_event(old, "note", {}),
        ]
        for write in writes:
            with pytest.raises(LeaseLostError):
                write()

        assert store.events(job_id) == before
        assert len(store.trials(job_id)) == 1

    def test_a_lease_that_expired_is_current_until_it_is_taken(self, store: Store, lease: Lease, clock) -> None:
        clock.advance(3600)
        store.add_event(lease, "note", {})

        assert store.heartbeat(lease).expires > clock.now

    def test_a_released_lease_writes_nothing(self, store: Store, lease: Lease) -> None:
        job = store.release(lease, JobState.PAUSED, "asked", "stopped \udcff by a person\0")

        assert (job.state, job.reason, job.owner) == (JobState.PAUSED, "asked", None)
        with pytest.raises(LeaseLostError):
            store.add_event(lease, "note", {})

    def test_active_seconds_are_those_in_which_it_was_held(self, store: Store, lease: Lease, clock) -> None:
        clock.advance(10)
        lease = store.heartbeat(lease, seconds=30)
        clock.advance(5)
        store.add_event(lease, "note", {})
        clock.advance(5)
        store.release(lease, JobState.PAUSED, "", "")
        clock.advance(1000)  # nobody holds it
        lease = store.acquire(lease.job_id, current_owner(), seconds=30)
        clock.advance(1000)  # the machine slept: held until the lease's end
        store.heartbeat(lease)

        assert store.job(lease.job_id).active_seconds == pytest.approx(20 + 30)

    def test_a_clock_set_back_takes_no_seconds_away(self, store: Store, lease: Lease, clock) -> None:
        clock.advance(-100)
        store.heartbeat(lease)

        assert store.job(lease.job_id).active_seconds == 0.0

    def test_attempts_of_the_former_holder_are_abandoned(self, store: Store, clock) -> None:
        job_id = store.create_job({}).id
        token = attempt(store, store.acquire(job_id, ELSEWHERE))
        clock.advance(31)
        lease = store.acquire(job_id, current_owner())

        assert [a.state for a in store.attempts(job_id)] == [AttemptState.ABANDONED]
        assert "attempt_abandoned" in kinds(store, job_id)
        assert not store.finish_attempt(lease, TrialResult(attempt=token, outcome=Outcome.OK))
        assert store.attempts(job_id)[0].state is AttemptState.SUPERSEDED
        assert store.trials(job_id)[0].outcome is None

    def test_release_abandons_what_still_runs(self, store: Store, lease: Lease) -> None:
        attempt(store, lease)
        store.release(lease, JobState.PAUSED, "", "")

        assert [a.state for a in store.attempts(lease.job_id)] == [AttemptState.ABANDONED]


class TestQuarantine:
    def test_a_node_is_kept_off_until_its_time_is_over(self, store: Store, lease: Lease, clock) -> None:
        held = store.quarantine_node(lease, "node-2", "ECC error\0", 60.0)
        assert (held.node, held.reason, held.job_id) == ("node-2", "ECC error\\0", lease.job_id)
        assert (held.until - held.since).total_seconds() == 60.0
        assert store.quarantined_nodes() == [held]
        [event] = [event for event in store.events(lease.job_id) if event.kind == "node_quarantined"]
        assert event.payload == {"node": "node-2", "reason": "ECC error\\0", "until": held.until.isoformat()}
        clock.advance(61)
        assert store.quarantined_nodes() == []
        assert not store.release_node("node-2")

    def test_a_second_reason_replaces_the_first(self, store: Store, lease: Lease, clock) -> None:
        store.quarantine_node(lease, "b", "first", 60.0)
        store.quarantine_node(lease, "a", "other", 60.0)
        clock.advance(30)
        store.quarantine_node(lease, "b", "second", 60.0)
        clock.advance(40)
        assert [(held.node, held.reason) for held in store.quarantined_nodes()] == [("b", "second")]

    def test_a_released_node_is_used_again_and_outlives_its_job(self, store: Store, lease: Lease) -> None:
        store.quarantine_node(lease, "a", "why", 60.0)
        store.release(lease, JobState.PAUSED, "", "")
        store.delete_job(lease.job_id)
        assert [held.node for held in store.quarantined_nodes()] == ["a"]
        assert store.release_node("a")
        assert store.quarantined_nodes() == []
        assert not store.release_node("a")

    def test_a_former_holder_puts_nothing_in_quarantine(self, store: Store, lease: Lease) -> None:
        store.release(lease, JobState.PAUSED, "", "")
        with pytest.raises(LeaseLostError):
            store.quarantine_node(lease, "a", "why", 60.0)
        assert store.quarantined_nodes() == []


class TestTrials:
    def test_a_trial_is_unique_by_config_purpose_fidelity_and_repeat(self, store: Store, lease: Lease) -> None:
        config = TrialConfig(zero_stage=2)
        first = store.add_trial(lease, config, Purpose.SEARCH)
        others = [
            store.add_trial(lease, TrialConfig(), Purpose.SEARCH),
            store.add_trial(lease, config, Purpose.CONFIRM),
            store.add_trial(lease, config, Purpose.SEARCH, fidelity="short"),
            store.add_trial(lease, config, Purpose.SEARCH, repeat=1),
        ]

        assert [first.number, *(trial.number for trial in others)] == [0, 1, 2, 3, 4]
        events = len(store.events(lease.job_id))
        assert store.add_trial(lease, config, Purpose.SEARCH) == first
        assert len(store.events(lease.job_id)) == events
        assert store.trials(lease.job_id) == [first, *others]

    def test_two_jobs_may_want_the_same(self, store: Store, lease: Lease) -> None:
        other = store.acquire(store.create_job({}).id, current_owner())

        assert store.add_trial(lease, TrialConfig(), Purpose.SEARCH).number == 0
        assert store.add_trial(other, TrialConfig(), Purpose.SEARCH).number == 0

    def test_a_refused_candidate_has_a_result_and_costs_nothing(self, store: Store, lease: Lease) -> None:
        refusal = TrialResult(attempt="", outcome=Outcome.INVALID, rule="divides", message="8 does not divide 12")
        trial = store.add_trial(lease, TrialConfig(), Purpose.SEARCH, refusal=refusal)

        assert (trial.outcome, trial.result, trial.counted, trial.attempts) == (Outcome.INVALID, refusal, False, 0)
        assert trial.finished is not None
        assert store.trials(lease.job_id) == [trial]
        assert kinds(store, lease.job_id)[-1] == "trial_refused"
        with pytest.raises(UnknownTrialError):
            store.start_attempt(lease, trial.number)

    def test_a_wanted_trial_can_be_refused_until_it_is_attempted(self, store: Store, lease: Lease) -> None:
        refusal = TrialResult(attempt="", outcome=Outcome.INFEASIBLE)
        store.add_trial(lease, TrialConfig(), Purpose.SEARCH)
        assert store.add_trial(lease, TrialConfig(), Purpose.SEARCH, refusal=refusal).outcome is Outcome.INFEASIBLE
        attempt(store, lease, TrialConfig(zero_stage=1))
        assert store.add_trial(lease, TrialConfig(zero_stage=1), Purpose.SEARCH, refusal=refusal).outcome is None

    def test_only_search_trials_that_started_are_counted(self, store: Store, lease: Lease) -> None:
        for purpose in Purpose:
            attempt(store, lease, purpose=purpose)
        store.add_trial(lease, TrialConfig(zero_stage=1), Purpose.SEARCH)

        assert [trial.counted for trial in store.trials(lease.job_id)] == [True, False, False, False, False]

    def test_the_first_reference_losses_stay(self, store: Store, lease: Lease) -> None:
        store.set_reference_losses(lease, ())
        store.set_reference_losses(lease, (2.5, 2.25))
        store.set_reference_losses(lease, (9.0,))

        assert store.job(lease.job_id).reference_losses == (2.5, 2.25)
        assert kinds(store, lease.job_id).count("reference_set") == 1


class TestAttempts:
    def test_an_accepted_result_is_the_trials(self, store: Store, lease: Lease, clock) -> None:
        clock.advance(1)
        token = attempt(store, lease)
        clock.advance(7)
        result = TrialResult(
            attempt=token,
            outcome=Outcome.OK,
            samples_per_second=Interval(mean=10.0, low=9.5, high=10.5),
            peak_memory_bytes=2**41,
            losses=(3.5, float("inf"), 1e-300),
            ranks=(RANK, dataclasses.replace(RANK, rank=1)),
            environment={"torch": "2.x", "path": "nul \0 and half a pair \udcff"},
        )

        assert store.finish_attempt(lease, result)
        trial = store.trials(lease.job_id)[0]
        assert (trial.outcome, trial.result, trial.attempts) == (Outcome.OK, result, 1)
        assert trial.started is not None
        assert trial.finished is not None
        assert (trial.finished - trial.started).total_seconds() == 7
        [record] = store.attempts(lease.job_id, 0)
        assert (record.state, record.number, record.result) == (AttemptState.ACCEPTED, 1, result)
        assert store.events(lease.job_id)[-1].payload["outcome"] == "OK"

    def test_a_retried_trial_stays_wanted(self, store: Store, lease: Lease) -> None:
        lost = TrialResult(attempt=attempt(store, lease), outcome=Outcome.LOST)

        assert store.finish_attempt(lease, lost, retry=True)
        assert store.trials(lease.job_id)[0].outcome is None
        assert store.finish_attempt(lease, TrialResult(attempt=store.start_attempt(lease, 0).token, outcome=Outcome.OK))
        assert [a.state for a in store.attempts(lease.job_id)] == [AttemptState.RETRIED, AttemptState.ACCEPTED]
        assert (store.trials(lease.job_id)[0].attempts, store.trials(lease.job_id)[0].counted) == (2, True)

    def test_a_late_result_is_kept_and_never_counted(self, store: Store, lease: Lease) -> None:
        late = attempt(store, lease)
        current = store.start_attempt(lease, 0).token

        assert not store.finish_attempt(lease, TrialResult(attempt=late, outcome=Outcome.FAILED, message="late"))
        assert store.trials(lease.job_id)[0].outcome is None
        assert store.finish_attempt(lease, TrialResult(attempt=current, outcome=Outcome.OK))
        assert store.trials(lease.job_id)[0].outcome is Outcome.OK
        kept = store.attempts(lease.job_id)[0]
        assert kept.result is not None
        assert (kept.state, kept.result.message) == (AttemptState.SUPERSEDED, "late")

    def test_a_result_given_twice_counts_once(self, store: Store, lease: Lease) -> None:
        result = TrialResult(attempt=attempt(store, lease), outcome=Outcome.OK, message="first")
        assert store.finish_attempt(lease, result)
        before = store.events(lease.job_id)

        assert store.finish_attempt(lease, dataclasses.replace(result, message="second"))
        assert store.events(lease.job_id) == before
        assert store.trials(lease.job_id)[0].result == result

    def test_what_is_not_there_is_refused(self, store: Store, lease: Lease) -> None:
        other = store.acquire(store.create_job({}).id, current_owner())
        token = attempt(store, other)

        with pytest.raises(UnknownTrialError):
            store.start_attempt(lease, 0)
        for name in (token, "nothing"):
            with pytest.raises(UnknownTrialError):
                store.finish_attempt(lease, TrialResult(attempt=name, outcome=Outcome.OK))


class TestPlacements:
    def test_since_when_and_where_trials_run(self, store: Store, lease: Lease, clock) -> None:
        named = dataclasses.replace(RANK, node="node-3")
        attempt(store, lease)
        began = store.attempts(lease.job_id, 0)[0].started
        clock.advance(5)
        for stage, told in enumerate(
            ({"ranks": (RANK,)}, {"ranks": (named, dataclasses.replace(RANK, rank=1))}, {"ranks": (RANK,), "node": "lost"}), 1
        ):
            token = attempt(store, lease, TrialConfig(zero_stage=stage))
            store.finish_attempt(lease, TrialResult(attempt=token, outcome=Outcome.OK, **told))
        store.add_trial(lease, TrialConfig(micro_batch_size=2), Purpose.SEARCH)
        found = store.placements(lease.job_id)
        assert {number: place.node for number, place in found.items()} == {0: None, 1: "here", 2: "node-3", 3: "lost"}
        assert (found[0].started, found[1].started > began) == (began, True)
        assert store.placements(lease.job_id, 2).keys() == {2, 3}

    def test_an_attempt_that_was_given_up_is_nowhere(self, store: Store, lease: Lease) -> None:
        attempt(store, lease)
        store.release(lease, JobState.PAUSED, "", "")
        assert store.placements(lease.job_id) == {}


class TestEvents:
    def test_they_are_numbered_without_a_gap_and_read_from_any_point(self, store: Store, lease: Lease) -> None:
        added = [store.add_event(lease, "note", {"index": index, "loss": float("nan")}) for index in range(5)]
        read = store.events(lease.job_id)

        assert [event.sequence for event in read] == list(range(1, 8))
        assert [event.payload["index"] for event in read[2:]] == list(range(5))
        assert [event.sequence for event in store.events(lease.job_id, after=3, limit=2)] == [4, 5]
        assert store.events(lease.job_id, after=added[-1].sequence) == []

    def test_a_second_store_sees_them(self, store: Store, lease: Lease, open_again: Callable[[], Store]) -> None:
        store.add_event(lease, "note", {"a": 1})

        assert open_again().events(lease.job_id) == store.events(lease.job_id)

    def test_a_closed_store_may_be_closed_again(self, store: Store) -> None:
        store.close()
        store.close()


class TestFigures:
    def test_they_are_the_trials_without_what_goes_with_each_rank_and_step(self, store: Store, lease: Lease) -> None:
        for number in range(5):
            store.add_trial(lease, TrialConfig(micro_batch_size=1 + number), Purpose.SEARCH)
        refused = TrialResult(attempt="", outcome=Outcome.INVALID, rule="some-rule", message="no")
        store.add_trial(lease, TrialConfig(zero_stage=3), Purpose.SEARCH, refusal=refused)
        whole = TrialResult(
            attempt="", outcome=Outcome.OK, message="told", samples_per_second=Interval(mean=3.0, low=2.0, high=4.0),
            within_relative_error=float("inf"), peak_memory_bytes=7, unstable=True, losses=(1.0,), step_seconds=(0.1,) * 20,
            environment={"torch": "2"}, phase_seconds={"setup": 1.0},
        )  # fmt: skip
        for number in (0, 2):
            token = store.start_attempt(lease, number).token
            store.finish_attempt(lease, dataclasses.replace(whole, attempt=token))
        slim = dataclasses.replace(whole, losses=(), step_seconds=(), environment={}, phase_seconds={})
        figures, trials = store.figures_of(lease.job_id), store.trials(lease.job_id)
        assert [trial.number for trial in figures] == list(range(6))
        for figure, trial in zip(figures, trials, strict=True):
            assert figure.config_hash == trial.config_hash == trial.config.hash
            expected = trial.result if trial.number not in (0, 2) else slim
            assert figure == dataclasses.replace(trial, result=expected)
        assert store.figures_of(lease.job_id, 4) == figures[4:]
        assert store.figures_of("nothing") == []

    def test_plain_trials_say_what_records_say(self, store: Store, lease: Lease) -> None:
        store.add_trial(lease, TrialConfig(), Purpose.SEARCH)
        attempt = store.start_attempt(lease, 0)
        store.finish_attempt(lease, TrialResult(attempt=attempt.token, outcome=Outcome.OK, losses=(5.0, float("nan"))))
        refusal = TrialResult(attempt="", outcome=Outcome.INVALID, rule="r", message="m")
        store.add_trial(lease, TrialConfig(zero_stage=3), Purpose.SEARCH, refusal=refusal)
        store.add_trial(lease, TrialConfig(), Purpose.CONFIRM, repeat=1)
        for record, item in zip(store.trial_page(lease.job_id), store.plain_trials(lease.job_id), strict=True):
            told = to_plain(record) | {"config": record.config.values(), "result": to_plain(record.result)}
            if told["result"]:
                del told["result"]["attempt"]
            assert repr(item) == repr({name: told[name] for name in item})  # as text: a NaN equals nothing
        assert [item["number"] for item in store.plain_trials(lease.job_id, 1, 1)] == [1]

    def test_sqlite_finds_the_attempt_of_a_trial_by_its_trial(self, tmp_path: Path) -> None:
        plans: list[str] = []
        with SqlStore(str(tmp_path / "jobs.db")) as store:
            engine = store._database._engine

            @event.listens_for(engine, "before_cursor_execute")
            def explain(connection, cursor, statement, parameters, context, many) -> None:  # type: ignore[no-untyped-def]
                if "JOIN attempts" in statement:
                    rows = cursor.connection.execute("EXPLAIN QUERY PLAN " + statement, parameters).fetchall()
                    plans.extend(row[3] for row in rows if "attempts" in row[3])

            store.figures_of("job")
            store.trial_page("job", 3, 10)
            store.plain_trials("job", 3, 10)
        assert len(plans) == 3
        assert all("job_id=? AND trial_number=?" in plan for plan in plans), plans
