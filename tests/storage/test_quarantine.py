"""Nodes that no job may use, on every backend."""

import pytest

from search_spaces.outcome import JobState
from storage.errors import LeaseLostError
from storage.records import Lease
from storage.store import Store


class TestQuarantine:
    @pytest.mark.prove
    def test_a_node_is_kept_off_until_its_time_is_over(self, store: Store, lease: Lease, clock) -> None:
        held = store.nodes.quarantine(lease, "node-2", "ECC error\0", 60.0)
        assert (held.node, held.reason, held.job_id) == ("node-2", "ECC error\\0", lease.job_id)
        assert (held.until - held.since).total_seconds() == 60.0
        assert store.nodes.quarantined() == [held]
        [event] = [event for event in store.events.of(lease.job_id) if event.kind == "node_quarantined"]
        assert event.payload == {"node": "node-2", "reason": "ECC error\\0", "until": held.until.isoformat()}
        clock.advance(61)
        assert store.nodes.quarantined() == []
        assert not store.nodes.release("node-2")

    def test_a_second_reason_replaces_the_first(self, store: Store, lease: Lease, clock) -> None:
        store.nodes.quarantine(lease, "b", "first", 60.0)
        store.nodes.quarantine(lease, "a", "other", 60.0)
        clock.advance(30)
        store.nodes.quarantine(lease, "b", "second", 60.0)
        clock.advance(40)
        assert [(held.node, held.reason) for held in store.nodes.quarantined()] == [("b", "second")]

    def test_a_released_node_is_used_again_and_outlives_its_job(self, store: Store, lease: Lease) -> None:
        store.nodes.quarantine(lease, "a", "why", 60.0)
        store.jobs.release(lease, JobState.PAUSED, "", "")
        store.jobs.delete(lease.job_id)
        assert [held.node for held in store.nodes.quarantined()] == ["a"]
        assert store.nodes.release("a")
        assert store.nodes.quarantined() == []
        assert not store.nodes.release("a")

    def test_a_former_holder_puts_nothing_in_quarantine(self, store: Store, lease: Lease) -> None:
        store.jobs.release(lease, JobState.PAUSED, "", "")
        with pytest.raises(LeaseLostError):
            store.nodes.quarantine(lease, "a", "why", 60.0)
        assert store.nodes.quarantined() == []
