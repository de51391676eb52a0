"""`autotune doctor --cluster`: each thing that would stop or falsify a sweep on a cluster is found, with its remedy."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from called import Command

from autotune.cli import doctor
from autotune.cli.doctor import CheckedItem, expected_by, links_of, node_findings, pair_findings
from executor.errors import RunnerError
from executor.runners.ray.checkup import Checkup, NodeFacts, Pair, Unreached, pairs_of
from executor.runners.ray.nodes import RayNode
from search_spaces.clusters.microbenchmark import GroupShape, MeasuredRow, Operation

VERSIONS = {"python": "3.11.2", "ray": "2.60.0", "torch": "2.13.0", "autotune": "0.1.0"}
TOPOLOGY = (
    "        GPU0    GPU1    GPU2    NIC0    CPU Affinity    NUMA Affinity",
    "GPU0     X      NV18    SYS     PIX     0-51            0",
    "GPU1    NV18     X      SYS     PIX     0-51            0",
    "GPU2    SYS     SYS      X      SYS     52-103          1",
    "NIC0    PIX     PIX     SYS      X",
)
OTHER_TOPOLOGY = tuple(line.replace("NV18", "NV12") for line in TOPOLOGY)


def facts(number: int, **changes: Any) -> NodeFacts:
    """A node with which all is well."""
    address = f"10.0.0.{number}"
    fields: dict[str, Any] = {
        "node": address, "address": address, "host": f"host{number}", "resolved": address,
        "interfaces": {"lo": "127.0.0.1", "eth0": address, "ib0": f"10.9.0.{number}"}, "environment": {}, "versions": VERSIONS,
        "rank_main": True, "shared_memory_bytes": 2**34, "locked_memory_bytes": None, "infiniband": True, "gpus": (),
        "topology": (),
    }  # fmt: skip
    return NodeFacts(**{**fields, **changes})


def node(number: int, **changes: Any) -> RayNode:
    address = f"10.0.0.{number}"
    fields = {"name": address, "node_id": str(number), "address": address, "host": f"host{number}", "alive": True}
    return RayNode(**{**fields, **changes})


def checkup(*found: NodeFacts, **changes: Any) -> Checkup:
    fields: dict[str, Any] = {
        "nodes": (node(1), node(2)), "facts": found or (facts(1), facts(2)), "silent": (), "unreached": (), "pairs": (),
        "backend": "gloo",
    }  # fmt: skip
    return Checkup(**{**fields, **changes})


def bad(findings: list[CheckedItem]) -> list[CheckedItem]:
    return [finding for finding in findings if not finding.good]


def test_a_sound_cluster_has_nothing_to_mend() -> None:
    found = node_findings(checkup(), VERSIONS)
    assert bad(found) == []
    assert {"python", "torch", "ports", "shared memory on 10.0.0.1", "gloo's interface on 10.0.0.2"} <= {
        item.name for item in found
    }


CASES: dict[str, tuple[Callable[[], Checkup], str, str, str]] = {
    "gone": (
        lambda: checkup(nodes=(node(1), node(2, alive=False, why_gone="health check failed"))),
        "node 10.0.0.2", "is gone: health check failed", "a supervisor does",
    ),
    "silent": (
        lambda: checkup(silent=(("10.0.0.2", "it did not answer in time"),)),
        "node 10.0.0.2", "is alive to Ray, but it did not answer in time", "start its Ray again",
    ),
    "other-torch": (
        lambda: checkup(facts(1), facts(2, versions=VERSIONS | {"torch": "2.12.0"})),
        "torch", "2.13.0 on here, 10.0.0.1; 2.12.0 on 10.0.0.2", "install the same torch on every node",
    ),
    "other-driver": (
        lambda: checkup(facts(1, versions=VERSIONS | {"driver": "580.1"}), facts(2, versions=VERSIONS | {"driver": "570.2"})),
        "driver", "580.1 on 10.0.0.1; 570.2 on 10.0.0.2", "install the same driver",
    ),
    "no-torch": (
        lambda: checkup(facts(1), facts(2, versions={name: VERSIONS[name] for name in ("python", "ray", "autotune")})),
        "torch", "is not installed for Ray's Python on 10.0.0.2", "pip install torch",
    ),
    "elsewhere": (
        lambda: checkup(facts(1), facts(2, rank_main=False)),
        "autotune", "is installed at another path on 10.0.0.2", "at the same path on every node",
    ),
    "resolves-to-itself": (
        lambda: checkup(facts(1), facts(2, resolved="127.0.1.1")),
        "gloo's interface on 10.0.0.2", "the name host2 resolves to 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0",
    ),
    "gloo-nowhere": (
        lambda: checkup(facts(1), facts(2, environment={"GLOO_SOCKET_IFNAME": "eth7"})),
        "gloo's interface on 10.0.0.2", "GLOO_SOCKET_IFNAME=eth7 is not among lo, eth0, ib0", "GLOO_SOCKET_IFNAME=eth0",
    ),
    "nccl-nowhere": (
        lambda: checkup(facts(1, gpus=("H100",), environment={"NCCL_SOCKET_IFNAME": "ens"}), facts(2)),
        "NCCL's interface on 10.0.0.1", "NCCL_SOCKET_IFNAME=ens: none of lo, eth0, ib0", "set it to eth0",
    ),
    "port": (
        lambda: checkup(unreached=(Unreached(listener="10.0.0.1", caller="10.0.0.2", problem="timed out"),)),
        "ports", "a rank's port on 10.0.0.1 cannot be reached from 10.0.0.2: timed out", "allow all TCP ports",
    ),
    "small-shm": (
        lambda: checkup(facts(1), facts(2, shared_memory_bytes=2**26)),
        "shared memory on 10.0.0.2", "64 MiB free in /dev/shm", "--shm-size",
    ),
    "memlock": (
        lambda: checkup(facts(1), facts(2, locked_memory_bytes=2**16)),
        "locked memory on 10.0.0.2", "64 KiB, with InfiniBand", "LimitMEMLOCK=infinity",
    ),
    "mixed-links": (
        lambda: checkup(facts(1, topology=TOPOLOGY), facts(2, topology=TOPOLOGY)),
        "links of GPUs on 10.0.0.1", "NV18 x 1, SYS x 2: GPU0-GPU2, GPU1-GPU2 communicate through", "tensor_parallel_size",
    ),
    "nodes-unlike": (
        lambda: checkup(facts(1, topology=TOPOLOGY), facts(2, topology=OTHER_TOPOLOGY)),
        "links of GPUs", "have different topologies on 10.0.0.1, 10.0.0.2", "identical",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_found_with_its_remedy(case: str) -> None:
    make, name, told, remedy = CASES[case]
    found = {item.name: item for item in bad(node_findings(make(), VERSIONS))}
    assert told in found[name].text
    assert remedy in found[name].remedy
    assert len(found) == (2 if case == "mixed-links" else 3 if case == "nodes-unlike" else 1)


@pytest.mark.parametrize(
    ("named", "good"),
    [("eth", True), ("=eth", False), ("=eth0", True), ("^docker", True), ("^eth,ib,lo", False), ("ib0,eth0", True)],
)
def test_the_interface_that_nccl_is_told_is_read_by_its_rule(named: str, good: bool) -> None:
    found = node_findings(checkup(facts(1, gpus=("H100",), environment={"NCCL_SOCKET_IFNAME": named})), VERSIONS)
    assert next(item.good for item in found if item.name.startswith("NCCL's")) is good


def test_links_are_read_pair_by_pair() -> None:
    assert links_of(TOPOLOGY) == {"GPU0-GPU1": "NV18", "GPU0-GPU2": "SYS", "GPU1-GPU2": "SYS"}


def pair(small: float, large: float, nodes: tuple[str, str] = ("a", "b")) -> Pair:
    return Pair(nodes=nodes, small_seconds=small, large_seconds=large)


def test_a_pair_is_held_against_the_calibration() -> None:
    rows = [
        MeasuredRow(
            operation=Operation.ALL_REDUCE, precision="fp32", shape=(size,), group=GroupShape(ranks=2, in_node=1),
            seconds=seconds, low=seconds, high=seconds, samples=5,
        )
        for size, seconds in ((4096, 1e-4), (2**24, 0.016777216))
    ]  # fmt: skip
    expected = expected_by(rows, "X")
    assert expected is not None
    assert (expected.small_seconds, round(expected.large_seconds, 6)) == (1e-4, 0.016777)
    assert expected_by([], "X") is None


def test_without_a_calibration_a_pair_is_held_against_the_middle() -> None:
    pairs = (pair(1e-4, 0.1), pair(1e-4, 0.1, ("a", "c")), pair(3e-4, 0.4, ("b", "c")))
    found = pair_findings(checkup(pairs=pairs), None)
    assert [item.good for item in found] == [True, True, False]
    assert found[2].text.endswith("3.0 times the latency and 25% of the bandwidth of the median of all pairs")
    assert "cable" in found[2].remedy
    assert all(item.good for item in pair_findings(checkup(pairs=pairs[1:]), None))  # two do not say which is wrong


def test_a_pair_that_fails_is_told_with_the_reason() -> None:
    (found,) = pair_findings(checkup(pairs=(Pair(nodes=("a", "b"), problem="connection refused"),)), None)
    assert (found.good, found.text) == (False, "gloo fails: connection refused")


def test_every_pair_of_few_nodes_and_a_ring_of_many() -> None:
    many = [node(number) for number in range(12)]
    assert len(pairs_of(many[:1])) == 0
    assert len(pairs_of(many[:4])) == 6
    ring = pairs_of(many)
    assert len(ring) == 12
    assert all(sum(one in pair for pair in ring) == 2 for one in many)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Checkup | RunnerError], None]:
    """What a look at the cluster finds."""

    def found(what: Checkup | RunnerError) -> None:
        def check_up(_: str) -> Checkup:
            if isinstance(what, RunnerError):
                raise what
            return what

        monkeypatch.setattr("executor.runners.ray.checkup.check_up", check_up)

    return found


def test_the_command_tells_everything_and_its_status_says_whether_a_sweep_can_go_on(
    command: Command, looked: Callable[[Any], None]
) -> None:
    here = doctor._versions_here()
    good = facts(1, versions=here)
    looked(checkup(good, nodes=(node(1, resources={"CPU": 2.0}),)))
    answer = command("doctor", "--cluster", "--json")
    findings = json.loads(answer.out)
    names = {item["name"] for item in findings}
    assert {"Ray", "database", "shared memory on 10.0.0.1"} <= names
    of_cluster = findings[[item["name"] for item in findings].index("Ray") :]
    assert all(item["good"] for item in of_cluster), of_cluster
    looked(checkup(dataclasses.replace(good, shared_memory_bytes=1), nodes=(node(1),)))
    answer = command("doctor", "--cluster")
    assert answer.status == 1
    assert "BAD  shared memory on 10.0.0.1: 1 B free in /dev/shm; allow at least 1 GiB" in answer.out


def test_that_there_is_no_cluster_is_a_finding(command: Command, looked: Callable[[Any], None]) -> None:
    looked(RunnerError("x; y"))
    answer = command("doctor", "--cluster")
    assert answer.status == 1
    assert "BAD  Ray: no Ray cluster runs on this machine; start one with `ray start --head`" in answer.out


def test_an_address_without_the_cluster_is_refused(command: Command) -> None:
    answer = command("doctor", "--ray-address", "a:1")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == "autotune: ray_address: is for a cluster, but only this machine is checked; add --cluster\n"
