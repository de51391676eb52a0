"""NUMA nodes as a machine tells them, and what a space makes of their number."""

from pathlib import Path

import pytest

from search_spaces.canonical import canonical
from search_spaces.capability import SpaceContext
from search_spaces.clusters.devices import core_list, node_of_device, numa_nodes
from search_spaces.clusters.presets import local_cluster, read_cluster_file, resolve_cluster
from search_spaces.errors import ClusterFormatError
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two sockets, memory without cores, and three devices."""
    for node, cores in ((0, "0-3,8-11"), (1, "4-7,12-15"), (10, ""), (2, "16")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n", encoding="ascii")
    (tmp_path / "devices/system/node/online").write_text("0-2,10\n", encoding="ascii")
    for address, node in (("0000:3b:00.0", 0), ("0000:af:00.0", 1), ("0000:d8:00.0", -1)):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n", encoding="ascii")
    return tmp_path


def test_nodes_with_cores_in_order(sysfs: Path) -> None:
    nodes = numa_nodes(sysfs)
    assert [*nodes] == [0, 1, 2]
    assert nodes[0] == {0, 1, 2, 3, 8, 9, 10, 11}
    assert nodes[2] == {16}


def test_a_device_has_the_node_that_is_told(sysfs: Path) -> None:
    assert [node_of_device(name, sysfs) for name in ("0000:3B:00.0", "0000:af:00.0")] == [0, 1]
    assert node_of_device("0000:d8:00.0", sysfs) is None  # the system does not know
    assert node_of_device("0000:00:00.0", sysfs) is None


def test_a_system_that_tells_nothing_has_no_nodes(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == {}


@pytest.mark.parametrize(("text", "cores"), [("0", {0}), ("0-1\n", {0, 1}), ("1,3-4", {1, 3, 4}), ("", set())])
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert core_list(text) == cores


def test_this_machine_tells_how_many_it_has() -> None:
    assert local_cluster().numa_nodes == (len(numa_nodes()) or None)


@pytest.mark.parametrize(("nodes", "stands"), [(1, False), (2, True), (None, True)])
def test_binding_to_the_only_node_is_none(tmp_path: Path, nodes: int | None, stands: bool) -> None:
    told = "" if nodes is None else f"numa_nodes = {nodes}\n"
    path = tmp_path / "own.toml"
    path.write_text(
        f"devices_per_node = 8\ndevice = 'a100-40gb'\nintra_node_bandwidth = 3e11\ninter_node_bandwidth = 2e11\n"
        f"host_memory_bytes = 1e12\ncores_per_node = 64\n{told}",
        encoding="utf-8",
    )
    cluster = read_cluster_file(path)
    assert cluster.numa_nodes == nodes
    context = SpaceContext(
        model=resolve_model("llama-tiny"), cluster=cluster, workload=Workload(global_batch_size=8, sequence_length=64),
        world_size=8, capability=None,
    )  # fmt: skip
    assert canonical(TrialConfig(numa_binding=True), context).numa_binding is stands


def test_a_preset_does_not_tell() -> None:
    assert resolve_cluster("dgx-a100:2").numa_nodes is None


def test_no_nodes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    path.write_text(
        "devices_per_node = 8\ndevice = 'a100-40gb'\nintra_node_bandwidth = 3e11\ninter_node_bandwidth = 2e11\n"
        "host_memory_bytes = 1e12\ncores_per_node = 64\nnuma_nodes = 0\n",
        encoding="utf-8",
    )
    with pytest.raises(ClusterFormatError, match="numa_nodes"):
        read_cluster_file(path)
