"""`autotune cluster`: what Ray reports, what was measured, what is in quarantine; and how a node is let in again."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from called import Command

from autotune.cli import cluster as module
from autotune.prediction.planning.calibrated import fingerprint
from autotune.request.request import JobRequest
from autotune.request.rows import request_to_row
from executor.errors import RunnerError
from executor.runners.ray.nodes import RayNode, cluster_of, nodes_of
from search_spaces.clusters.microbenchmark import SINGLE_RANK, GroupShape, MeasuredRow, MicrobenchmarkResult, Operation
from search_spaces.outcome import Outcome
from storage.records import Owner
from storage.store import Store, open_store

MIB = 2**20
TABLE = [
    {
        "NodeID": letter * 8, "Alive": alive, "NodeManagerAddress": address, "NodeName": address,
        "NodeManagerHostname": f"host-{letter}", "Resources": {"CPU": 2.0, "memory": 2.0**33},
        "DeathReasonMessage": "" if alive else "health check failed",
    }
    for letter, address, alive in (("a", "10.0.0.1", True), ("b", "10.0.0.2", True), ("c", "10.0.0.3", False))
]  # fmt: skip


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> tuple[RayNode, ...]:
    found = nodes_of(TABLE)
    monkeypatch.setattr(module, "ray_nodes", lambda _: found)
    return found


@pytest.fixture
def document(command: Command) -> Callable[[], dict[str, Any]]:
    def call() -> dict[str, Any]:
        answer = command("cluster", "--json")
        assert (answer.status, answer.err) == (0, "")
        return json.loads(answer.out)

    return call


def measured(operation: Operation, shape: tuple[int, ...], seconds: float, group: GroupShape = SINGLE_RANK) -> MeasuredRow:
    return MeasuredRow(
        operation=operation, precision="fp32", shape=shape, group=group, seconds=seconds, low=seconds, high=seconds, samples=5
    )


def calibrate(store: Store, nodes: tuple[RayNode, ...]) -> None:
    cluster = cluster_of([node.resources for node in nodes if node.alive])
    rows = (
        measured(Operation.PRODUCT, (1000, 1000, 1000), 0.04),
        measured(Operation.COPY, (10**6,), 0.002),
        measured(Operation.ALL_REDUCE, (MIB,), 0.001, GroupShape(ranks=2, in_node=2)),
        measured(Operation.ALL_REDUCE, (MIB,), 0.01, GroupShape(ranks=2, in_node=1, sharing=2)),
    )
    result = MicrobenchmarkResult(attempt="", outcome=Outcome.OK, rows=rows, hosts=("host-a", "host-a", "host-z", "host-z"))
    store.calibrations.save(fingerprint(cluster), cluster, result, 9.0)


def quarantine(store: Store, node: str) -> None:
    job = store.jobs.create(request_to_row(JobRequest(model="gpt2")))
    lease = store.jobs.acquire(job.id, Owner(host="h", pid=1, started=0.0))
    store.nodes.quarantine(lease, node, "2 trials failed there and succeeded elsewhere", 3600.0)


def test_nodes_devices_and_links_without_a_calibration(command: Command, nodes: tuple[RayNode, ...]) -> None:
    answer = command("cluster")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines()[0] == "Ray at auto: 2 nodes, 1 gone"
    for told in (
        "10.0.0.1  host-a  alive", "10.0.0.3  host-c  gone", "8 GiB",
        "10.0.0.3 is gone: health check failed; start Ray on it again",
        "sweeps with --cluster ray run on 2 x 2 cpu, 4 GiB each",
        "links, estimated: 2 GB/s in a node, 2.5 GB/s between nodes; measure them with `autotune calibrate --cluster ray`",
    ):  # fmt: skip
        assert told in answer.out, told


def test_what_is_stated_stands_beside_what_was_measured(
    command: Command, nodes: tuple[RayNode, ...], folder: Any, document: Callable[[], dict[str, Any]]
) -> None:
    with open_store(str(folder / "jobs.db")) as store:
        calibrate(store, nodes)
    told = command("cluster").out
    assert "fp32 products of a device: 0.1, 0.05 TFLOP/s (50%)" in told
    assert "memory of a device: 5, 4 GB/s (80%)" in told
    assert "links in a node: 2, 1.05 GB/s (52%)" in told
    assert "network of a node: 2.5, 0.21 GB/s (8%)" in told  # two groups share it
    assert "it was not measured on host-b; `autotune calibrate --cluster ray --force` measures all nodes" in told
    found = document()["calibration"]
    assert found["not_measured"] == ["host-b"]
    assert [claim["what"] for claim in found["claims"]][-1] == "network of a node"


@pytest.mark.prove
def test_a_node_in_quarantine_is_shown_and_released(
    command: Command, nodes: tuple[RayNode, ...], folder: Any, document: Callable[[], dict[str, Any]]
) -> None:
    with open_store(str(folder / "jobs.db")) as store:
        quarantine(store, "10.0.0.2")
    told = command("cluster").out
    assert "10.0.0.2  host-b  quarantine" in told
    assert "2 trials failed there and succeeded elsewhere; `autotune cluster --release 10.0.0.2`" in told
    assert [item["node"] for item in document()["quarantine"]] == ["10.0.0.2"]
    wrong = command("cluster", "--release", "10.0.0.9")
    assert (wrong.status, wrong.err) == (2, "autotune: release: '10.0.0.9' is not in quarantine; give one of 10.0.0.2\n")
    right = command("cluster", "--release", "10.0.0.2")
    assert (right.status, right.out, right.err) == (0, "", "10.0.0.2 is released\n")
    assert document()["quarantine"] == []
    again = command("cluster", "--release", "10.0.0.2")
    assert (again.status, again.err.count("\n")) == (2, 1)
    assert "no node is" in again.err


def test_nodes_that_differ_are_shown_and_why_no_sweep_runs_on_them(
    command: Command, monkeypatch: pytest.MonkeyPatch, document: Callable[[], dict[str, Any]]
) -> None:
    other = {**TABLE[1], "Resources": {"CPU": 8.0, "memory": 2.0**33}}
    monkeypatch.setattr(module, "ray_nodes", lambda _: nodes_of([TABLE[0], other]))
    assert "the Ray cluster's nodes differ in devices; describe those to be used in a TOML file" in command("cluster").out
    found = document()
    assert (found["cluster"], found["calibration"]) == (None, None)
    assert found["problem"].startswith("the Ray cluster's nodes differ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "autotune: no Ray cluster runs on this machine; start one with `ray start --head`, or name another's with --ray"),
        (("--ray-address", "a:1"), "autotune: it does not answer; look"),
    ],
)
def test_that_nothing_is_there_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    def refuse(_: str) -> None:
        raise RunnerError("it does not answer; look")

    monkeypatch.setattr(module, "ray_nodes", refuse)
    answer = command("cluster", *words)
    assert (answer.status, answer.out, answer.err.count("\n")) == (1, "", 1)
    assert answer.err.startswith(line)


def test_nodes_that_share_a_name_are_told_apart_and_a_gone_one_that_came_back_is_not_shown() -> None:
    twin = {**TABLE[0], "NodeID": "d" * 8}
    before = {**TABLE[1], "NodeID": "e" * 8, "Alive": False}
    assert [node.name for node in nodes_of([twin, before, *TABLE])] == [
        "10.0.0.1-aaaaaa",
        "10.0.0.1-dddddd",
        "10.0.0.2",
        "10.0.0.3",
    ]


@pytest.mark.prove
@pytest.mark.parametrize("name", ["predict", "plan", "fit"])
def test_commands_that_predict_take_what_ray_tells(described: None, command: Command, name: str) -> None:
    for words, ranks in (((), 4), (("--ranks", "2"), 2)):
        answer = command(name, "config.json", "--cluster", "ray", *words, "--json")
        assert (answer.status, answer.err) == (0, "")
        assert json.loads(answer.out)["world_size"] == ranks


def test_a_space_is_counted_for_what_ray_tells(described: None, command: Command) -> None:
    assert "on ray with 4 ranks" in command("space", "config.json", "--ray-address", "a:1").out


@pytest.fixture
def described(nodes: tuple[RayNode, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two cores."""
    there = cluster_of([node.resources for node in nodes if node.alive])
    monkeypatch.setattr("executor.runners.ray.nodes.describe_cluster", lambda _: there)
