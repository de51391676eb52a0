"""A Ray cluster as its nodes tell of it."""

from typing import Any

import pytest

from executor.errors import RunnerError
from executor.runners.ray.nodes import RayNode, cluster_of, describe_cluster, in_common

GPU_NODE = {"CPU": 64.0, "GPU": 8.0, "memory": 2.0**40, "accelerator_type:H100": 1.0, "node:10.0.0.1": 1.0}
CPU_NODE = {"CPU": 4.0, "memory": 2.0**34, "node:10.0.0.9": 1.0}


def test_gpus_by_node_and_the_head_without_any_left_out() -> None:
    found = cluster_of([CPU_NODE, GPU_NODE, GPU_NODE])
    assert (found.nodes, found.devices_per_node, found.world_size, found.cores_per_node) == (2, 8, 16, 64)
    assert found.device.name.startswith("h100")


def test_the_smaller_memory_of_a_family() -> None:
    node = {**GPU_NODE, "accelerator_type:A100-40G": 1.0}
    del node["accelerator_type:H100"]
    assert "40" in cluster_of([node]).device.name


@pytest.mark.parametrize(
    ("name", "preset"), [("GB200", "gb200"), ("B300", "b300"), ("L40S", "l40s"), ("AMD-Instinct-MI325X-OAM", "mi325x")]
)
def test_devices_by_the_names_that_ray_gives_them(name: str, preset: str) -> None:
    node = {**GPU_NODE, f"accelerator_type:{name}": 1.0}
    del node["accelerator_type:H100"]
    assert cluster_of([node]).device.name == preset


def test_without_gpus_a_rank_is_a_core() -> None:
    found = cluster_of([CPU_NODE, CPU_NODE])
    assert (found.nodes, found.devices_per_node, found.device.kind, found.device.memory_bytes) == (2, 4, "cpu", 2**32)


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([GPU_NODE, {**GPU_NODE, "GPU": 4.0}], "nodes differ in devices"),
        ([{"CPU": 1.0, "GPU": 1.0, "accelerator_type:XPU9": 1.0}], "no device preset is known for Ray's XPU9 GPUs"),
        ([], "nodes differ"),
    ],
)
def test_what_cannot_be_described_is_one_line(nodes: list[dict[str, float]], told: str) -> None:
    with pytest.raises(RunnerError, match=told):
        cluster_of(nodes)


def test_packages_that_all_nodes_have_in_one_version() -> None:
    liger, engine = {"liger_kernel": "0.8.5"}, {"transformer_engine": "2.8.0"}
    assert in_common([{**liger, **engine}, {**liger, "transformer_engine": "2.7.0"}]) == liger
    assert in_common([liger, engine]) == in_common([]) == {}


def test_nodes_with_gpus_alone_are_asked_for_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(name: str, resources: dict[str, float], alive: bool = True) -> RayNode:
        return RayNode(name=name, node_id=f"id-{name}", address="", host="", alive=alive, resources=resources)

    asked: list[Any] = []

    def told(address: str, node_ids: list[str]) -> dict[str, str]:
        asked.append((address, node_ids))
        return {"liger_kernel": "0.8.5"}

    nodes = (node("head", CPU_NODE), node("one", GPU_NODE), node("two", GPU_NODE), node("gone", {}, alive=False))
    monkeypatch.setattr("executor.runners.ray.nodes.kernel_packages", told)
    monkeypatch.setattr("executor.runners.ray.nodes.ray_nodes", lambda address: nodes)
    assert describe_cluster("there").kernel_packages == {"liger_kernel": "0.8.5"}
    assert asked == [("there", ["id-one", "id-two"])]
    monkeypatch.setattr("executor.runners.ray.nodes.ray_nodes", lambda address: nodes[:1])
    assert describe_cluster("there").kernel_packages is None
    assert len(asked) == 1
