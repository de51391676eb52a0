"""Gangs side by side on a Ray cluster of several nodes: what they share, what becomes of them when a node dies."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from runner_contract import ENVIRONMENT, TRIAL_FUNCTION, request_for, results, run, watch

from executor.runners.ray import RayRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import NodeEvent, Progress
from search_spaces.trial_config import TrialConfig
from tests.chaos.ray_nodes import DEVICES, RayNodes

pytestmark = pytest.mark.ray
SEATS = 2
"""Ranks on a node."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes(2, {}) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def runner(nodes: RayNodes) -> Iterator[RayRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "executor.runners.ray.formation.RESERVE_SECONDS", 60.0
        )  # else a node that is slow to answer counts as full
        with RayRunner(
            SEATS, address=nodes.address, device="cpu", gpus_per_rank=DEVICES / SEATS, environment=ENVIRONMENT,
            trial_function=TRIAL_FUNCTION, placement_seconds=180.0,
        ) as runner:  # fmt: skip
            yield runner


def both_run(events: list) -> bool:
    return len({handle for handle, event in events if isinstance(event, Progress)}) == 2


def nodes_of(runner: RayRunner, handle: str) -> set[str]:
    return {slot.node.name for slot in runner._running[handle].slots}


class TestSideBySide:
    """Several gangs at once, and of several sizes."""

    @pytest.mark.prove
    def test_as_many_trials_run_at_once_as_fit_and_they_share_no_device(self, runner: RayRunner, tmp_path: Path) -> None:
        assert runner.node_capacities() == {"node-0": SEATS, "node-1": SEATS}
        assert runner.capacity() == 2
        runner.warm_up(request_for().model)
        assert runner.capacity() == 2
        handles = [runner.submit(request_for(f"held:{tmp_path / 'end'}")) for _ in range(3)]
        assert runner.capacity() == 0
        seen = watch(runner, both_run)
        held = [slot for formed in runner._running.values() for slot in formed.slots]
        assert len(held) == len(set(held)) == 2 * SEATS
        (tmp_path / "end").touch()
        seen += watch(runner, lambda events: len(results(seen + events)) == 3)
        ended = {result.attempt: result for result in results(seen)}
        assert {ended[handle].outcome for handle in handles} == {Outcome.OK}
        first, second = (ended[handle].environment for handle in handles[:2])
        assert first["pid"] != second["pid"]
        assert len(first["devices"].split(",")) == DEVICES // SEATS
        assert runner.capacity() == 2

    @pytest.mark.prove
    def test_a_trial_of_another_size_takes_the_warm_ranks_as_they_are(self, runner: RayRunner) -> None:
        before = run(runner)
        wide = run(runner, world_size=2 * SEATS)
        one = run(runner, world_size=1)
        after = run(runner)
        assert [result.losses for result in (before, wide, one, after)] == [(4.0,), (16.0,), (1.0,), (4.0,)]
        # Which rank of a node is the first of a gang is left open.
        assert len({result.environment["pid"] for result in (before, wide, one, after)}) <= SEATS
        assert wide.warm
        assert one.warm
        assert after.warm


@pytest.mark.nightly
class TestTopology:
    """Which ranks are where."""

    def test_a_tensor_group_stays_within_a_node(self, runner: RayRunner) -> None:
        across = TrialConfig(tensor_parallel_size=2 * SEATS)
        refused = run(runner, config=across, world_size=2 * SEATS)
        assert (refused.outcome, refused.rule) == (Outcome.INVALID, "tensor_across_nodes")
        assert f"the largest holds {SEATS}" in refused.message
        within = run(runner, config=TrialConfig(tensor_parallel_size=SEATS), world_size=2 * SEATS)
        assert within.outcome is Outcome.OK

    def test_excluded_nodes_are_not_used(self, runner: RayRunner) -> None:
        for node in ("node-0", "node-1"):
            handle = runner.submit(request_for("stream", excluded_nodes=(node,)))
            assert nodes_of(runner, handle) == {"node-0", "node-1"} - {node}
            assert results(watch(runner, results))[0].outcome is Outcome.OK

    def test_ranks_go_to_the_nodes_that_they_are_for(self, runner: RayRunner) -> None:
        for first, second in (("node-1", "node-0"), ("node-0", "node-1")):
            kinds = ((first, SEATS), (second, SEATS))
            handle = runner.submit(request_for("stream", world_size=2 * SEATS, node_kinds=kinds))
            slots = runner._running[handle].slots
            assert [slot.node.name for slot in slots] == [first] * SEATS + [second] * SEATS
            assert results(watch(runner, results))[0].outcome is Outcome.OK
        refused = run(runner, world_size=2 * SEATS, node_kinds=(("node-0", 2 * SEATS),))
        assert (refused.outcome, refused.rule) == (Outcome.INVALID, "node_kinds")
        assert "the trial needs 4 ranks on nodes with node-0, which the Ray cluster has no room for" in refused.message

    def test_too_few_seats_without_excluded_nodes_is_one_line(self, runner: RayRunner) -> None:
        left = run(runner, excluded_nodes=("node-0",), world_size=2 * SEATS)
        assert (left.outcome, left.message) == (
            Outcome.LOST,
            "4 ranks are needed, but there is room for 2 without node-0, which this trial must not use; add nodes",
        )


@pytest.mark.nightly
class TestEnds:
    """What ends one of two trials, and nodes that go and come: the last of this module, for they change its cluster."""

    def test_the_end_of_one_leaves_the_other(self, runner: RayRunner, nodes: RayNodes) -> None:
        stays = runner.submit(request_for("hang", excluded_nodes=("node-0",), timeout_seconds=600.0))

        dies = runner.submit(request_for("spawn"))
        seen = watch(runner, both_run)
        child = next(int(event.message) for _, event in seen if isinstance(event, Progress) and event.message)
        os.kill(psutil.Process(child).ppid(), signal.SIGKILL)
        (lost,) = results(watch(runner, results))
        assert (lost.attempt, lost.outcome, lost.node) == (dies, Outcome.LOST, "node-0")

        goes = runner.submit(request_for("hang", world_size=1))
        watch(runner, lambda events: any(handle == goes for handle, _ in events))
        runner.cancel(goes, "not needed")
        (cancelled,) = results(watch(runner, results))
        assert (cancelled.attempt, cancelled.outcome) == (goes, Outcome.CANCELLED)

        assert nodes_of(runner, stays) == {"node-1"}
        nodes.kill("node-1")
        seen = watch(runner, lambda events: results(events) and any(isinstance(event, NodeEvent) for _, event in events))
        (lost,) = results(seen)
        assert (lost.attempt, lost.outcome, lost.node) == (stays, Outcome.LOST, "node-1")
        assert [(event.node, event.kind) for _, event in seen if isinstance(event, NodeEvent)] == [("node-1", "lost")]
        assert runner.capacity() == 1

    def test_a_node_that_comes_is_used(self, runner: RayRunner, nodes: RayNodes) -> None:
        wide = runner.submit(request_for(world_size=SEATS + 1))  # waits for room, for there was some once
        assert runner.events(0.5) == []
        name = nodes.add()
        seen = watch(runner, results)
        assert [(event.node, event.kind) for _, event in seen if isinstance(event, NodeEvent)] == [(name, "added")]
        (result,) = results(seen)
        assert (result.attempt, result.outcome, result.losses) == (wide, Outcome.OK, (9.0,))
        assert runner.capacity() == 2


@pytest.mark.nightly
def test_on_cpus_side_by_side_each_rank_has_its_own_core(started_cpus: Callable[[], RayRunner], tmp_path: Path) -> None:
    with started_cpus() as runner:
        assert runner.capacity() == 2
        for _ in range(2):
            runner.submit(request_for(f"held:{tmp_path / 'end'}", world_size=1))
        watch(runner, both_run)
        (tmp_path / "end").touch()
        first, second = (result.environment for result in results(watch(runner, lambda events: len(results(events)) == 2)))
        assert (first["threads"], second["threads"]) == ("1", "1")
        assert len({first["cores"], second["cores"]}) == 2
        assert "," not in first["cores"] + second["cores"]


@pytest.fixture
def started_cpus(nodes: RayNodes, runner: RayRunner) -> Callable[[], RayRunner]:
    """Makes a runner of single ranks on CPUs, on the connection that is there."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be divided")
    del nodes, runner
    return lambda: RayRunner(1, gangs=2, device="cpu", environment=ENVIRONMENT, trial_function=TRIAL_FUNCTION)
