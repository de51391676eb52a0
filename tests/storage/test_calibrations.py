"""Micro-benchmarks are kept whole, found by their cluster, taken along by backups, and pruned when replaced."""

import io
from datetime import timedelta

import pytest

from search_spaces.clusters.microbenchmark import GroupShape, MeasuredRow, MicrobenchmarkResult, Operation
from search_spaces.clusters.presets import local_cluster
from search_spaces.outcome import Outcome
from storage.store import Store, open_store


def measured(seconds: float) -> MicrobenchmarkResult:
    group = GroupShape(ranks=4, in_node=2, sharing=2)
    row = MeasuredRow(
        operation=Operation.ALL_REDUCE, precision="fp32", shape=(4096,), group=group, seconds=seconds, low=seconds / 2,
        high=2 * seconds, samples=7,
    )  # fmt: skip
    return MicrobenchmarkResult(
        attempt="", outcome=Outcome.OK, rows=(row,), hosts=("a", "a", "b", "b"), environment={"torch": "2.13.0"},
        context_bytes=2**33,
    )  # fmt: skip


class TestCalibrations:
    @pytest.mark.prove
    def test_what_was_measured_comes_back_newest_first_by_fingerprint(self, store: Store, clock) -> None:
        cluster = local_cluster(2)
        first = store.calibrations.save("f" * 16, cluster, measured(0.1), 21.5)
        clock.advance(1)
        second = store.calibrations.save("f" * 16, cluster, measured(0.2), 20.0)
        other = store.calibrations.save("e" * 16, cluster, measured(0.3), 20.0)

        assert store.calibrations.newest("f" * 16) == [second, first]
        assert store.calibrations.newest("f" * 16, limit=1) == [second]
        assert {record.id for record in store.calibrations.newest()} == {first.id, second.id, other.id}
        assert store.calibrations.newest("none") == []
        assert (first.cluster, first.rows, first.hosts) == (cluster, measured(0.1).rows, ("a", "a", "b", "b"))
        assert (first.seconds, first.context_bytes, first.workspace_bytes) == (21.5, 2**33, None)

    def test_pruning_keeps_the_newest_of_each_cluster(self, store: Store, clock) -> None:
        old = [store.calibrations.save(name, local_cluster(2), measured(0.1), 1.0) for name in ("a", "b")]
        clock.advance(60)
        new = store.calibrations.save("a", local_cluster(2), measured(0.1), 1.0)
        clock.advance(60)

        assert store.maintenance.prune(clock() - timedelta(seconds=90)).calibrations == 1
        assert {record.id for record in store.calibrations.newest()} == {new.id, old[1].id}
        assert store.maintenance.prune(clock()).calibrations == 0

    def test_a_backup_takes_them_along_and_may_be_restored_twice(self, store: Store, tmp_path) -> None:
        saved = store.calibrations.save("a", local_cluster(2), measured(0.1), 1.0)
        sink = io.StringIO()
        store.transfer.dump(sink)
        with open_store(str(tmp_path / "elsewhere.db")) as elsewhere:
            for _ in range(2):
                elsewhere.transfer.load(sink)
                assert elsewhere.calibrations.newest() == [saved]
