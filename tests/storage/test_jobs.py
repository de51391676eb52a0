"""Jobs and their events, on every backend."""

from collections.abc import Callable

import pytest

from search_spaces.outcome import JobState, Outcome
from search_spaces.trial import TrialResult
from storage.errors import LeaseHeldError, UnknownJobError
from storage.records import JobFilter, Lease
from storage.store import Store
from tests.storage.job_steps import RANK, attempt, kinds


class TestJobs:
    def test_a_new_job_is_queued_and_told(self, store: Store) -> None:
        job = store.jobs.create({"model": "m", "budget": {"trials": 3}})

        assert (job.state, job.owner, job.active_seconds, job.reference_losses) == (JobState.QUEUED, None, 0.0, {})
        assert store.jobs.get(job.id) == job
        assert job.request == {"model": "m", "budget": {"trials": 3}}
        assert kinds(store, job.id) == ["job_created"]

    def test_ids_are_short_and_sort_by_the_second(self, store: Store, clock) -> None:
        ids = []
        for _ in range(3):
            ids.append(store.jobs.create({}).id)
            clock.advance(1)

        assert ids == sorted(ids)
        assert all(len(job_id) == 20 for job_id in ids)

    def test_the_latest_is_the_default(self, store: Store, clock) -> None:
        store.jobs.create({})
        clock.advance(0.000001)
        latest = store.jobs.create({})

        assert store.jobs.get() == latest

    def test_latest_names_the_job_that_was_created_last(self, store: Store, clock) -> None:
        store.jobs.create({})
        clock.advance(1)
        newest = store.jobs.create({})
        assert store.jobs.get("latest") == store.jobs.get() == newest

    def test_tags_narrow_the_list_to_jobs_that_have_all_of_them(self, store: Store, clock) -> None:
        ids = []
        for tags in (("a", "b_c"), ("a",), ("A", "bxc"), ("ab",), ()):
            ids.append(store.jobs.create({"tags": tags}).id)
            clock.advance(1)
        store.jobs.create({})
        found = {
            tags: [job.id for job in store.jobs.newest(having=JobFilter(tags=tags))]
            for tags in (("a",), ("a", "b_c"), ("A",), ("b_c",), ("c",))
        }
        assert list(found.values()) == [[ids[1], ids[0]], [ids[0]], [ids[2]], [ids[0]], []]

    def test_words_narrow_the_list_to_jobs_that_have_all_of_them(self, store: Store, clock) -> None:
        # Ids end in four random characters: what is searched for is longer, or has a character that ids do not have.
        first = {"name": "Grüße grand 100%", "tags": ("smoke",), "model": "llama-tiny", "trials": 7777}
        second = {"name": "gruss grand", "note": 'a_b says "no"', "model": {"name": "llama"}, "cluster": "a100x8"}
        ids = []
        for request in (first, second, {"name": "ÜBER"}):
            ids.append(store.jobs.create(request).id)
            clock.advance(1)
        for text, found in {
            "GRüße": ids[:1], "ÜBER": ids[2:], "GRand": ids[1::-1],
            "tiny SMOKE": ids[:1], "tiny gruss": [], "100%": ids[:1], "a%8": [],
            "a_b": ids[1:2], "a?b": [], '"no"': ids[1:2], "queued": ids[::-1], ids[2]: ids[2:], "7777": [],
            "smoke\nllama": ids[:1], "trials": [], " ": ids[::-1], "\\": [], "/": [],
        }.items():  # fmt: skip
            assert [job.id for job in store.jobs.newest(having=JobFilter(text=text))] == found, text

    def test_a_prefix_names_a_job_that_only_it_fits(self, store: Store, clock) -> None:
        first = store.jobs.create({})
        clock.advance(3600)
        second = store.jobs.create({})

        assert store.jobs.get(first.id[:12]) == first
        assert store.jobs.get(second.id) == second
        for name in (first.id[:8], "20991231", "", "%", first.id + "x"):
            with pytest.raises(UnknownJobError):
                store.jobs.get(name)

    def test_no_job_at_all(self, store: Store) -> None:
        with pytest.raises(UnknownJobError, match="autotune sweep"):
            store.jobs.get()

    def test_pages_are_newest_first_with_no_gap_and_no_repeat(self, store: Store, clock) -> None:
        created = []
        for index in range(7):
            created.append(store.jobs.create({}).id)
            clock.advance(index % 2)  # some share a moment
        seen: list[str] = []
        while page := store.jobs.newest(limit=3, before=seen[-1] if seen else None):
            seen += [job.id for job in page]

        assert sorted(seen) == sorted(created)
        assert [store.jobs.get(job_id).created for job_id in seen] == sorted(
            (store.jobs.get(i).created for i in created), reverse=True
        )

    def test_deleting_removes_all_that_belongs_to_it(self, store: Store, lease: Lease) -> None:
        store.attempts.finish(lease, TrialResult(attempt=attempt(store, lease), outcome=Outcome.OK, ranks=(RANK,)))
        with pytest.raises(LeaseHeldError):
            store.jobs.delete(lease.job_id)
        store.jobs.release(lease, JobState.PAUSED, "", "")
        store.jobs.delete(lease.job_id)

        assert (store.jobs.newest(), store.trials.of(lease.job_id), store.attempts.of(lease.job_id)) == ([], [], [])
        assert store.events.of(lease.job_id) == []
        with pytest.raises(UnknownJobError):
            store.jobs.delete(lease.job_id)


class TestEvents:
    def test_they_are_numbered_without_a_gap_and_read_from_any_point(self, store: Store, lease: Lease) -> None:
        added = [store.events.add(lease, "note", {"index": index, "loss": float("nan")}) for index in range(5)]
        read = store.events.of(lease.job_id)

        assert [event.sequence for event in read] == list(range(1, 8))
        assert [event.payload["index"] for event in read[2:]] == list(range(5))
        assert [event.sequence for event in store.events.of(lease.job_id, after=3, limit=2)] == [4, 5]
        assert store.events.of(lease.job_id, after=added[-1].sequence) == []

    def test_a_second_store_sees_them(self, store: Store, lease: Lease, open_again: Callable[[], Store]) -> None:
        store.events.add(lease, "note", {"a": 1})

        assert open_again().events.of(lease.job_id) == store.events.of(lease.job_id)

    def test_a_closed_store_may_be_closed_again(self, store: Store) -> None:
        store.close()
        store.close()
