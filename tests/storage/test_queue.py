"""The queue, what people ask of jobs, and API keys: on every backend."""

import threading
from datetime import timedelta

import pytest

from search_spaces.outcome import JobState, Purpose, StopReason
from search_spaces.trial_config import TrialConfig
from storage.errors import JobStateError, LeaseHeldError, SubmissionConflictError, UnknownJobError, UnknownKeyError
from storage.leases import current_owner
from storage.records import Ask, AttemptState, Lease, Owner, QueueLimits, Submission
from storage.store import Store
from tests.storage.job_steps import ELSEWHERE

HERE = current_owner()


def submit(store: Store, **submission: object) -> str:
    return store.queue.submit({"model": "m"}, Submission(**submission))[0].id  # type: ignore[arg-type]


def claimed(store: Store, owner: Owner = ELSEWHERE, limits: QueueLimits | None = None) -> Lease:
    lease = store.queue.claim(owner, limits=limits)
    assert lease is not None
    return lease


class TestClaiming:
    def test_an_empty_queue_gives_nothing(self, store: Store) -> None:
        assert store.queue.claim(HERE) is None

    def test_a_job_that_was_opened_directly_is_nobody_elses(self, store: Store) -> None:
        lease = store.jobs.acquire(store.jobs.create({}).id, ELSEWHERE, seconds=1)
        assert store.queue.claim(HERE) is None
        store.jobs.release(lease, JobState.PAUSED, "", "")
        assert store.queue.claim(HERE) is None

    def test_jobs_go_by_priority_then_in_order(self, store: Store, clock) -> None:
        ids = []
        for priority in (0, 5, 0):
            ids.append(submit(store, priority=priority))
            clock.advance(1)
        assert [claimed(store).job_id for _ in range(3)] == [ids[1], ids[0], ids[2]]
        assert store.queue.claim(HERE) is None

    def test_who_has_fewer_running_jobs_goes_first(self, store: Store, clock) -> None:
        names = ["anna", "anna", "anna", "ben"]
        for name in names:
            submit(store, submitter=name)
            clock.advance(0.001)
        order = [store.jobs.get(claimed(store).job_id).submitter for _ in names]
        assert order == ["anna", "ben", "anna", "anna"]

    def test_a_submitter_has_no_more_running_jobs_than_allowed(self, store: Store) -> None:
        limits = QueueLimits(running_jobs=1)
        submit(store, submitter="anna", priority=9)
        submit(store, submitter="anna", priority=9)
        submit(store, submitter="ben")
        first, second = claimed(store, limits=limits), claimed(store, limits=limits)
        assert [store.jobs.get(lease.job_id).submitter for lease in (first, second)] == ["anna", "ben"]
        assert store.queue.claim(HERE, limits=limits) is None
        store.jobs.release(first, JobState.SUCCEEDED, "BUDGET", "")
        assert store.jobs.get(claimed(store, limits=limits).job_id).submitter == "anna"

    def test_what_a_dead_process_left_goes_first_in_the_state_that_it_was_in(self, store: Store, clock) -> None:
        job_id = submit(store)
        lease = claimed(store)
        number = store.trials.add(lease, TrialConfig(), Purpose.SEARCH).number
        store.attempts.start(lease, number)
        store.queue.ask(job_id, Ask.STOP)
        submit(store, priority=9)
        clock.advance(31)
        again = claimed(store)
        assert (again.job_id, again.token, again.state) == (job_id, 2, JobState.STOPPING)
        assert [attempt.state for attempt in store.attempts.of(job_id)] == [AttemptState.ABANDONED]

    def test_a_dead_process_of_this_host_is_not_waited_for(self, store: Store) -> None:
        job_id = submit(store)
        dead = Owner(host=HERE.host, pid=2**22 + 1, started=1.0)
        claimed(store, dead)
        assert claimed(store, HERE).job_id == job_id

    def test_a_live_holder_is_left_alone(self, store: Store) -> None:
        submit(store)
        claimed(store, HERE)
        assert store.queue.claim(ELSEWHERE) is None

    def test_a_job_that_is_given_back_keeps_its_place(self, store: Store, clock) -> None:
        first = submit(store)
        clock.advance(1)
        submit(store)
        store.jobs.release(claimed(store), JobState.QUEUED, "", "")
        assert claimed(store).job_id == first

    def test_a_job_with_a_ray_cluster_is_not_for_the_devices_of_the_workers_machine(self, store: Store) -> None:
        request = {"runner": "ray", "ray_address": "auto", "resolved_cluster": {"device": {"kind": "cuda"}}}
        job = store.queue.submit(request, Submission())[0].id
        assert claimed(store, limits=QueueLimits(local_devices=frozenset({"cpu"}))).job_id == job

    @pytest.mark.prove(every=5)
    @pytest.mark.parametrize(
        ("limits", "wanted"),
        [
            (QueueLimits(), [0, 1, 2]),
            (QueueLimits(runners=frozenset({"ray"})), [0, 2]),
            (QueueLimits(devices=frozenset({"cpu"})), [1, 2]),
            (QueueLimits(local_devices=frozenset({"cpu"})), [1, 2]),
            (QueueLimits(runners=frozenset({"ray", "local"}), devices=frozenset({"cuda"})), [0]),
        ],
    )
    def test_a_worker_takes_the_jobs_that_it_is_for_also_those_left_behind(
        self, store: Store, clock, limits: QueueLimits, wanted: list[int]
    ) -> None:
        ids = []
        for runner, kind in (("ray", "cuda"), ("local", "cpu"), ("ray", "cpu")):
            request = {"runner": runner, "resolved_cluster": {"device": {"kind": kind}}}
            ids.append(store.queue.submit(request, Submission())[0].id)
            clock.advance(1)
        for left_behind in (False, True):
            found = [claimed(store, limits=limits) for _ in wanted]
            assert [lease.job_id for lease in found] == [ids[number] for number in wanted], left_behind
            assert store.queue.claim(ELSEWHERE, limits=limits) is None
            clock.advance(31)

    @pytest.mark.prove
    def test_many_workers_never_claim_one_job_twice(self, open_again) -> None:
        store = open_again()
        ids = {submit(store, submitter=f"s{number % 3}") for number in range(24)}
        found: list[str] = []

        def work() -> None:
            with open_again() as mine:
                while (lease := mine.queue.claim(ELSEWHERE, limits=QueueLimits(running_jobs=8))) is not None:
                    found.append(lease.job_id)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == sorted(ids)


class TestSubmitting:
    def test_a_key_opens_one_job(self, store: Store) -> None:
        submission = Submission(submitter="anna", key="k", body_hash="1")
        job, new = store.queue.submit({"model": "m"}, submission)
        assert new
        assert store.queue.submit({"model": "m"}, submission) == (job, False)
        assert store.queue.submit({"model": "m"}, Submission(submitter="ben", key="k", body_hash="1"))[1]
        with pytest.raises(SubmissionConflictError, match="another body; use a new key"):
            store.queue.submit({"model": "n"}, Submission(submitter="anna", key="k", body_hash="2"))
        assert len(store.jobs.newest()) == 2

    def test_keys_that_race_open_one_job(self, open_again) -> None:
        stores = [open_again() for _ in range(4)]
        found: list[str] = []

        def work(store: Store) -> None:
            found.append(store.queue.submit({"model": "m"}, Submission(key="k", body_hash="1"))[0].id)

        threads = [threading.Thread(target=work, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(found)) == 1
        assert len(stores[0].jobs.newest()) == 1


class TestAsking:
    @pytest.mark.prove(every=2)
    @pytest.mark.parametrize(
        ("wanted", "state", "reason"),
        [
            (Ask.PAUSE, JobState.PAUSED, "paused"),
            (Ask.STOP, JobState.SUCCEEDED, StopReason.STOPPED),
            (Ask.CANCEL, JobState.CANCELLED, "cancelled"),
        ],
    )
    def test_what_nobody_holds_changes_at_once(self, store: Store, wanted: Ask, state: JobState, reason: str) -> None:
        job = store.queue.ask(submit(store), wanted)
        assert (job.state, job.reason) == (state, reason)
        assert store.queue.claim(HERE) is None
        event = store.events.of(job.id)[-1]
        assert (event.kind, event.payload) == ("job_asked", {"ask": wanted, "state": state})

    @pytest.mark.parametrize(
        ("wanted", "state", "left"),
        [
            (Ask.PAUSE, JobState.PAUSING, JobState.PAUSED),
            (Ask.STOP, JobState.STOPPING, JobState.SUCCEEDED),
            (Ask.CANCEL, JobState.CANCELLING, JobState.CANCELLED),
        ],
    )
    def test_a_holder_learns_of_it_by_its_lease(self, store: Store, wanted: Ask, state: JobState, left: JobState) -> None:
        job_id = submit(store)
        lease = claimed(store, HERE)
        assert store.queue.ask(job_id, wanted).state is state
        assert store.jobs.heartbeat(lease).state is state
        assert store.jobs.release(lease, JobState.QUEUED, "", "").state is left, "given back before it was seen"

    def test_the_stronger_of_two_holds(self, store: Store) -> None:
        job_id = submit(store)
        claimed(store, HERE)
        states = [store.queue.ask(job_id, wanted).state for wanted in (Ask.STOP, Ask.PAUSE, Ask.CANCEL, Ask.STOP)]
        assert states == [JobState.STOPPING, JobState.STOPPING, JobState.CANCELLING, JobState.CANCELLING]

    def test_a_process_that_is_gone_is_not_waited_for(self, store: Store, clock) -> None:
        job_id = submit(store)
        claimed(store)
        clock.advance(31)
        assert store.queue.ask(job_id, Ask.CANCEL).state is JobState.CANCELLED
        assert store.jobs.get(job_id).owner is None

    def test_a_paused_job_goes_back_to_the_queue(self, store: Store) -> None:
        job_id = submit(store)
        store.queue.ask(job_id, Ask.PAUSE)
        assert store.queue.ask(job_id, Ask.RESUME).state is JobState.QUEUED
        assert claimed(store).job_id == job_id
        assert store.queue.ask(job_id, Ask.RESUME).state is JobState.RUNNING

    def test_a_job_of_the_command_line_can_go_to_the_queue(self, store: Store) -> None:
        lease = store.jobs.acquire(store.jobs.create({}).id, ELSEWHERE)
        store.jobs.release(lease, JobState.PAUSED, "", "")
        store.queue.ask(lease.job_id, Ask.RESUME)
        assert claimed(store).job_id == lease.job_id

    def test_a_job_that_has_succeeded_goes_on_with_a_larger_budget(self, store: Store) -> None:
        job_id = store.queue.submit({"model": "m", "trials": 5}, Submission())[0].id
        store.jobs.release(claimed(store), JobState.SUCCEEDED, StopReason.BUDGET, "5 of 5 trials are spent")
        for budget in (None, {"trials": 5}, {"max_seconds": 60.0}):
            with pytest.raises(JobStateError, match=r"give it a larger budget \(trials above 5\), or clone it"):
                store.queue.ask(job_id, Ask.RESUME, budget)
        assert store.jobs.get(job_id).request["trials"] == 5
        job = store.queue.ask(job_id, Ask.RESUME, {"trials": 9})
        assert (job.state, job.reason, job.message, job.request["trials"]) == (JobState.QUEUED, "", "", 9)
        assert [event.kind for event in store.events.of(job_id)][-2:] == ["job_changed", "job_asked"]
        assert claimed(store).job_id == job_id

    def test_a_job_that_goes_on_in_this_process_is_left_alone_by_workers(self, store: Store) -> None:
        job_id = store.queue.submit({"model": "m", "trials": 5}, Submission())[0].id
        store.jobs.release(claimed(store), JobState.SUCCEEDED, StopReason.BUDGET, "")
        assert store.queue.ask(job_id, Ask.RESUME, {"trials": 9}, for_worker=False).state is JobState.QUEUED
        assert store.queue.claim(HERE) is None
        assert store.jobs.acquire(job_id, HERE).state is JobState.RUNNING

    def test_what_a_person_stopped_goes_on_with_its_own_budget(self, store: Store) -> None:
        job_id = submit(store)
        store.queue.ask(job_id, Ask.STOP)
        assert store.queue.ask(job_id, Ask.RESUME).state is JobState.QUEUED

    @pytest.mark.prove(every=3)
    @pytest.mark.parametrize("wanted", [Ask.PAUSE, Ask.STOP, Ask.CANCEL])
    def test_asking_again_changes_nothing(self, store: Store, wanted: Ask) -> None:
        job_id = submit(store)
        done = store.queue.ask(job_id, wanted)
        assert store.queue.ask(job_id, wanted) == done

    @pytest.mark.parametrize("wanted", [Ask.PAUSE, Ask.RESUME, Ask.STOP])
    def test_what_has_ended_cannot_be_changed(self, store: Store, wanted: Ask) -> None:
        job_id = submit(store)
        store.queue.ask(job_id, Ask.CANCEL)
        with pytest.raises(JobStateError, match=f"is CANCELLED, so that it cannot {wanted}"):
            store.queue.ask(job_id, wanted)

    def test_an_unknown_job(self, store: Store) -> None:
        with pytest.raises(UnknownJobError):
            store.queue.ask("20300101-000000-aaaa", Ask.PAUSE)


class TestChanging:
    def test_fields_get_other_values(self, store: Store) -> None:
        job_id = submit(store)
        job = store.queue.change_request(job_id, None, {"trials": 7})
        assert job.request == {"model": "m", "trials": 7}
        assert store.events.of(job_id)[-1].payload == {"trials": 7}
        assert store.queue.change_request(job_id, job.version, {"trials": 7}).version == job.version

    def test_a_version_that_has_passed_is_refused(self, store: Store) -> None:
        job_id = submit(store)
        version = store.jobs.get(job_id).version
        store.queue.change_request(job_id, version, {"trials": 7})
        with pytest.raises(JobStateError, match="has changed since it was read"):
            store.queue.change_request(job_id, version, {"trials": 8})
        assert store.jobs.get(job_id).request["trials"] == 7

    @pytest.mark.parametrize(
        ("state", "remedy"), [(JobState.SUCCEEDED, "resume it with a larger budget"), (JobState.CANCELLED, "clone it")]
    )
    def test_the_request_of_a_job_that_has_ended_stays(self, store: Store, state: JobState, remedy: str) -> None:
        job_id = submit(store)
        store.jobs.release(claimed(store), state, "", "")
        with pytest.raises(JobStateError, match=f"cannot be changed; {remedy}"):
            store.queue.change_request(job_id, None, {"trials": 7, "name": "n"})
        assert store.jobs.get(job_id).request == {"model": "m"}
        assert store.queue.change_request(job_id, None, {"name": "n", "tags": ("a",)}).request["tags"] == ["a"]

    def test_a_holder_cannot_end_a_job_on_a_request_that_has_changed(self, store: Store) -> None:
        job_id = submit(store)
        lease, known = claimed(store), store.jobs.get(job_id).request
        store.queue.change_request(job_id, None, {"trials": 7})
        version = store.jobs.get(job_id).version
        with pytest.raises(JobStateError, match="has changed since it was read"):
            store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "", known)
        assert (store.jobs.get(job_id).state, store.jobs.get(job_id).version) == (JobState.RUNNING, version)
        assert store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "", store.jobs.get(job_id).request).owner is None

    def test_a_process_that_holds_the_job_keeps_others_from_taking_it(self, store: Store) -> None:
        job_id = submit(store)
        claimed(store, HERE)
        with pytest.raises(LeaseHeldError):
            store.jobs.acquire(job_id, ELSEWHERE)


class TestKeys:
    def test_a_key_is_known_by_its_text_alone(self, store: Store) -> None:
        key, text = store.keys.create("anna", {"read", "submit"})
        known = store.keys.authenticate(text)
        assert known is not None
        assert (known.id, known.owner, known.scopes) == (key.id, "anna", frozenset({"read", "submit"}))
        assert text.startswith(f"at_{key.id}_")
        for wrong in ("", "at", text[:-1], text + "x", text.replace(key.id, "0" * 12), f"at_{key.id}_", "at_\0_x", "at_é_x"):
            assert store.keys.authenticate(wrong) is None

    def test_an_expired_or_revoked_key_is_none(self, store: Store, clock) -> None:
        _, short = store.keys.create("anna", {"read"}, clock() + timedelta(hours=1))
        key, text = store.keys.create("anna", {"read"})
        clock.advance(3600)
        assert store.keys.authenticate(short) is None
        assert store.keys.authenticate(text) is not None
        assert store.keys.revoke(key.id).revoked == clock()
        assert store.keys.authenticate(text) is None
        with pytest.raises(UnknownKeyError, match="there is no API key"):
            store.keys.revoke("nobody")

    def test_the_last_use_is_kept_to_the_minute(self, store: Store, clock) -> None:
        key, _ = store.keys.create("anna", {"read"})
        first = clock()
        store.keys.note_use(key)
        clock.advance(30)
        store.keys.note_use(store.keys.all()[0])
        assert store.keys.all()[0].last_used == first
        clock.advance(30)
        store.keys.note_use(store.keys.all()[0])
        assert store.keys.all()[0].last_used == clock()

    def test_no_secret_is_kept(self, store: Store) -> None:
        key, text = store.keys.create("anna", {"read"})
        secret = text.removeprefix(f"at_{key.id}_")
        assert secret not in repr(store.keys.all())


def test_several_submissions_are_one_transaction_and_each_is_answered_as_alone(store: Store) -> None:
    known, _ = store.queue.submit({"n": 0}, Submission(submitter="anna", key="old", body_hash="0"))
    asked = [("anna", "old", "0"), ("anna", "old", "x"), ("anna", "new", "1"), ("ben", "new", "2"), ("anna", "new", "1"),
             ("anna", "new", "3"), ("anna", None, ""), ("anna", None, "")]  # fmt: skip
    answers = store.queue.submit_all(
        [
            ({"n": number}, Submission(submitter=who, key=key, body_hash=body, priority=number))
            for number, (who, key, body) in enumerate(asked)
        ]
    )
    conflicts = [number for number, answer in enumerate(answers) if isinstance(answer, SubmissionConflictError)]
    assert conflicts == [1, 5]
    jobs = {number: answer for number, answer in enumerate(answers) if not isinstance(answer, SubmissionConflictError)}
    assert {number: new for number, (_, new) in jobs.items()} == {0: False, 2: True, 3: True, 4: False, 6: True, 7: True}
    assert jobs[0][0] == known
    assert jobs[4][0] == jobs[2][0]
    assert len({job.id for job, _ in jobs.values()}) == 5
    for number in (2, 3, 6, 7):
        job = jobs[number][0]
        assert (job.submitter, job.priority, job.request, job.version) == (asked[number][0], number, {"n": number}, 1)
        assert store.jobs.exact([job.id, "nothing", "\0"]) == {job.id: job}
        assert [event.kind for event in store.events.of(job.id)] == ["job_created"]
    assert store.queue.submit_all([]) == []
