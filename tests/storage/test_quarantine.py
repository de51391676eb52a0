"""Nodes that no job may use, on every backend."""

import pytest

from search_spaces.outcome import JobState
from storage.errors import LeaseLostError
from storage.records import Lease
from storage.store import Store


class TestQuarantine:
    @pytest.mark.prove
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
