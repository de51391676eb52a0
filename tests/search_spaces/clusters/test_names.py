"""Clusters and devices by the names that people, drivers and clouds write."""

import dataclasses
from pathlib import Path

import pytest

from search_spaces.clusters.cards import assumed_figures
from search_spaces.clusters.devices import devices_named
from search_spaces.clusters.presets import cluster_source, is_cluster_name, resolve_cluster
from search_spaces.errors import ClusterFormatError, UnknownNameError
from search_spaces.preset_files import preset_tables


@pytest.mark.parametrize(
    ("text", "name", "device", "nodes", "per_node", "link"),
    [
        ("8xH100", "8xh100", "h100", 1, 8, 450e9),
        ("8x H100 80GB HBM3", "8xh100-80gb-hbm3", "h100", 1, 8, 450e9),
        ("H200x8", "8xh200", "h200", 1, 8, 450e9),
        ("2×A100-SXM4-40GB", "2xa100-sxm4-40gb", "a100-40gb", 1, 2, 300e9),
        ("4 x A100 80GB PCIe", "4xa100-80gb-pcie", "a100-pcie-80gb", 1, 4, 25e9),
        ("8xh100-pcie", "8xh100-pcie", "h100-pcie", 1, 8, 50e9),
        ("2xH100-NVL", "2xh100-nvl", "h100-nvl", 1, 2, 50e9),
        ("16x8xB200", "8xb200:16", "b200", 16, 8, 900e9),
        ("8xV100:3", "8xv100:3", "v100-16gb", 3, 8, 150e9),
        ("4xRTX3090", "4xrtx3090", "3090", 1, 4, 25e9),
        ("2xrtx-6000-ada", "2xrtx-6000-ada", "rtx-6000-ada", 1, 2, 25e9),
        ("8xMI300X", "8xmi300x", "mi300x", 1, 8, 448e9),
        ("3x24gb", "3x24GB", "a 24GB card", 1, 3, 25e9),
    ],
)
def test_a_number_of_cards(text: str, name: str, device: str, nodes: int, per_node: int, link: float) -> None:
    cluster = resolve_cluster(text)
    assert (cluster.name, cluster.device.name, cluster.nodes, cluster.devices_per_node) == (name, device, nodes, per_node)
    assert cluster.intra_node_bandwidth == link
    assert is_cluster_name(text)
    assert resolve_cluster(name) == cluster


@pytest.mark.parametrize("name", preset_tables("devices"))
def test_every_preset_of_a_device_is_a_card(name: str) -> None:
    assert resolve_cluster(f"2x{name}").device.name == name
    assert devices_named(f"NVIDIA {name.upper()}")[0] == name


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("NVIDIA GeForce RTX 5090", ("5090",)),
        ("GeForce RTX 2080 Ti", ("2080ti",)),
        ("NVIDIA A10G", ("a10g",)),
        ("Tesla T4", ("t4",)),
        ("NVIDIA RTX A6000", ("a6000",)),
        ("a100", ("a100-80gb", "a100-40gb")),
        ("V100-SXM2-32GB", ("v100-32gb",)),
        ("A100_40G", ("a100-40gb",)),
        ("B200 192GB", ("b200",)),
        ("B200 180GB", ("b200",)),
        ("a100-pcie", ("a100-pcie-80gb", "a100-pcie-40gb")),
        ("L4 PCIe", ("l4",)),
        ("h100-40gb", ()),
        ("rtx6000", ()),
        ("H100 of somebody", ()),
    ],
)
def test_devices_of_a_name(text: str, devices: tuple[str, ...]) -> None:
    assert devices_named(text) == devices


def test_words_of_drivers_may_be_left_over() -> None:
    assert devices_named("NVIDIA GH200 480GB", whole=False) == ("gh200",)
    assert devices_named("NVIDIA GH200 480GB") == ()


@pytest.mark.parametrize(
    ("text", "preset", "nodes"),
    [
        ("DGX H100:4", "dgx-h100", 4),
        ("P5.48xlarge:2", "aws-p5", 2),
        ("ml.p4d.24xlarge", "aws-p4d", 1),
        ("A3-MegaGPU-8g", "gcp-a3-mega", 1),
        ("nd96isr_h100_v5:16", "azure-nd-h100-v5", 16),
        ("Standard_ND96amsr_A100_v4", "azure-ndm-a100-v4", 1),
    ],
)
def test_a_machine_in_another_spelling(text: str, preset: str, nodes: int) -> None:
    cluster, expected = resolve_cluster(text), resolve_cluster(f"{preset}:{nodes}")
    assert dataclasses.replace(cluster, name=expected.name) == expected
    assert is_cluster_name(text)
    assert assumed_figures(cluster) == ()


def test_an_instance_has_the_figures_of_its_page() -> None:
    cluster = resolve_cluster("g5.12xlarge:2")
    assert (cluster.devices_per_node, cluster.device.name, cluster.host_memory_bytes) == (4, "a10g", 192 * 2**30)
    assert (cluster.inter_node_bandwidth, cluster.cores_per_node) == (5e9, 24)
    assert "Amazon" in cluster_source("g5.12xlarge")


def test_what_is_assumed_of_cards() -> None:
    figures = {figure.name: figure for figure in assumed_figures(resolve_cluster("2x8xA100"))}
    assert (figures["device"].value, figures["device"].alternatives) == ("a100-80gb", ("a100-40gb",))
    assert (figures["intra_node_bandwidth"].value, figures["intra_node_bandwidth"].alternatives) == (300e9, (25e9,))
    assert figures["inter_node_bandwidth"].value == resolve_cluster("dgx-a100").inter_node_bandwidth
    assert set(figures["inter_node_bandwidth"].alternatives) >= {resolve_cluster("aws-p4de").inter_node_bandwidth, 12.5e9}
    assert list(figures)[-1] == "host_memory_bytes"


def test_of_a_memory_size_the_card_and_its_links_are_assumed() -> None:
    device, link, *_ = assumed_figures(resolve_cluster("8x80GB"))
    assert (device.value, device.alternatives) == ("a 80GB card", ("a100-80gb", "h100"))
    assert device.text == "a 80GB card has 79.04 GiB for use and 100 TFLOP/s"
    assert (link.value, link.alternatives) == (25e9, (450e9,))
    assert [figure.alternatives for figure in assumed_figures(resolve_cluster("2x7GB"))][:2] == [(), (12.5e9, 5e10)]


def test_of_racks_the_link_domain_is_assumed() -> None:
    figures = {figure.name: figure for figure in assumed_figures(resolve_cluster("4xgb200:18"))}
    assert (figures["link_domain_size"].value, figures["link_domain_size"].alternatives) == (72, (4,))
    assert figures["host_memory_bytes"].value == 960 * 2**30
    assert resolve_cluster("8xgb200:18").link_domain_size is None


def test_a_module_states_its_links() -> None:
    stated, open_ = (resolve_cluster(text) for text in ("8xh100-sxm5", "8xh100"))
    assert [figure.alternatives for figure in assumed_figures(stated) if figure.name == "intra_node_bandwidth"] == [()]
    assert [figure.alternatives for figure in assumed_figures(open_) if figure.name == "intra_node_bandwidth"] == [(50e9,)]
    texts = {figure.text for one in (stated, open_) for figure in assumed_figures(one) if figure.name == "intra_node_bandwidth"}
    assert texts == {"NVLink, 450 GB/s between the cards of a machine"}
    assert "intra_node_bandwidth" not in {figure.name for figure in assumed_figures(resolve_cluster("1xh100"))}


def test_a_file_with_such_a_name_assumes_nothing_that_it_states(tmp_path: Path) -> None:
    machine = resolve_cluster("8xh100")
    stated = dataclasses.replace(machine, intra_node_bandwidth=1e11, host_memory_bytes=2**40)
    assert {figure.name for figure in assumed_figures(machine)} == {"intra_node_bandwidth", "host_memory_bytes"}
    assert assumed_figures(stated) == ()


@pytest.mark.parametrize("text", ["h100", "H100:8", "rtx4090", "NVIDIA A100 80GB PCIe"])
def test_the_number_of_devices_is_asked_for(text: str) -> None:
    with pytest.raises(ClusterFormatError, match="does not state how many devices a machine has; write 1x") as caught:
        resolve_cluster(text)
    assert "\n" not in str(caught.value)
    assert not is_cluster_name(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xh10", "did you mean 8xh100"),
        ("2x24", "did you mean 2x24GB"),
        ("0x3090", "or give NAME:NODES"),
        ("p5.49xlarge", "p5.48xlarge"),
        ("ten machines of mine", "`autotune clusters` lists them"),
    ],
)
def test_what_is_unknown_is_answered_with_what_is_near(text: str, said: str) -> None:
    with pytest.raises(UnknownNameError, match=said):
        resolve_cluster(text)


def test_nodes_are_stated_once() -> None:
    with pytest.raises(ClusterFormatError, match="states the number of nodes twice"):
        resolve_cluster("2x8xh100:4")
