"""Clusters: presets, this machine, files, and what is said of bad ones."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from search_spaces.clusters import presets as clusters
from search_spaces.clusters.cluster import ClusterSpec, DeviceSpec, with_shape
from search_spaces.clusters.devices import device_preset, link_of
from search_spaces.clusters.presets import cluster_preset_names, cluster_source, is_cluster_name, local_cluster, resolve_cluster
from search_spaces.errors import ClusterFormatError, SearchSpaceError, UnknownNameError
from search_spaces.plain import from_plain, to_plain
from search_spaces.preset_files import preset_tables

FILE = """
device = "a100-80gb"
nodes = 3
devices_per_node = 4
intra_node_bandwidth = 300e9
inter_node_bandwidth = 25e9
host_memory_bytes = 500_000_000_000
cores_per_node = 64
"""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_cores", lambda: 2)


@pytest.mark.parametrize("name", cluster_preset_names())
def test_preset_survives_plain_data(name: str) -> None:
    cluster = resolve_cluster(f"{name}:2")
    assert cluster.world_size == 2 * cluster.devices_per_node
    assert from_plain(ClusterSpec, json.loads(json.dumps(to_plain(cluster)))) == cluster
    assert cluster_source(name)


@pytest.mark.parametrize("name", preset_tables("devices"))
def test_device_states_its_source(name: str) -> None:
    device = device_preset(name)
    assert "data sheet" in device.source or "white paper" in device.source
    assert re.search(r"; memory\b[^:]*: \S", device.source)
    assert device.peak_flops["fp16"] > device.peak_flops["fp32"] > 1e12
    assert device.memory_bandwidth is not None


def devices_table() -> str:
    lines = ["| device | GiB | bf16 | fp16 | fp8 | tf32 | TB/s | link, GB/s | source |", "|---|" + "---:|" * 6 + "---|---|"]
    for name in preset_tables("devices"):
        device, (link, rate, _) = device_preset(name), link_of(name)
        peaks = [f"{device.peak_flops[kind] / 1e12:g}" if kind in device.peak_flops else "-" for kind in PEAKS]
        bandwidth = f"{(device.memory_bandwidth or 0) / 1e12:.4g}"
        cells = (f"`{name}`", f"{device.memory_bytes / 2**30:.2f}", *peaks, bandwidth, f"{link}, {rate / 1e9:g}", device.source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


PEAKS = ("bf16", "fp16", "fp8", "tf32")
PAGE = Path(__file__).parents[3] / "docs" / "clusters.md"


def test_the_page_lists_the_devices() -> None:
    """Write the table anew with AUTOTUNE_WRITE_GOLDEN=1."""
    before, table, after = re.split(
        r"(?s)(?<=test_cluster.py -->\n\n)(.*)(?=\n\n<!-- end of devices)", PAGE.read_text(encoding="utf-8")
    )
    if os.environ.get("AUTOTUNE_WRITE_GOLDEN"):
        table = devices_table()
        PAGE.write_text(before + table + after, encoding="utf-8")
    assert table == devices_table()


def test_published_figures() -> None:
    cluster = resolve_cluster("dgx-a100:4")
    assert (cluster.nodes, cluster.world_size, cluster.device.memory_bytes) == (4, 32, int(79.151 * 2**30))
    assert cluster.device.peak_flops["bf16"] == 312e12
    assert not resolve_cluster("dgx-1v").device.supports("bf16")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_gpus_are_known_by_the_names_of_their_drivers(name: str, preset: str) -> None:
    expected = device_preset(preset)
    device = local_cluster(gpu_name=name, gpu_count=1, gpu_memory_bytes=expected.memory_bytes).device
    assert device == dataclasses.replace(expected, name=name)


def test_local_has_two_ranks_unless_told() -> None:
    assert local_cluster().world_size == 2
    cluster = resolve_cluster("local", ranks=8, memory_limit_bytes=10_000)
    assert (cluster.world_size, cluster.device.kind, cluster.device.memory_bytes) == (8, "cpu", 10_000)
    assert cluster.device.supports("fp16")
    assert not cluster.device.supports("fp8")


@pytest.mark.parametrize("ranks", [0, -1, 9])
def test_local_refuses_more_ranks_than_four_a_core(ranks: int) -> None:
    with pytest.raises(ClusterFormatError, match="use at most 8 ranks"):
        resolve_cluster("local", ranks=ranks)


def test_local_gpus_take_the_figures_of_their_data_sheet() -> None:
    cluster = local_cluster(gpu_name="NVIDIA A100-SXM4-40GB", gpu_count=2, gpu_memory_bytes=42_000_000_000)
    assert (cluster.world_size, cluster.device.memory_bytes) == (2, 42_000_000_000)
    assert cluster.device.memory_bandwidth == device_preset("a100-40gb").memory_bandwidth
    assert resolve_cluster("local", live=cluster) == cluster
    with pytest.raises(ClusterFormatError, match="2 GPUs"):
        local_cluster(3, gpu_name="NVIDIA L4", gpu_count=2, gpu_memory_bytes=1)


def test_a_gpu_that_is_not_known_has_its_memory_alone() -> None:
    device = local_cluster(gpu_name="NVIDIA L2", gpu_count=1, gpu_memory_bytes=48).device
    assert (device.memory_bytes, device.peak_flops) == (48, {})


def test_a_pcie_board_is_not_the_module_of_its_name() -> None:
    board = local_cluster(gpu_name="NVIDIA H100 PCIe", gpu_count=1, gpu_memory_bytes=80 * 2**30).device
    assert board.peak_flops["bf16"] == 756e12


def test_cards_are_a_machine() -> None:
    """A maker's GB are GiB, of which the driver keeps 1.2 %; main memory is three times that of the cards, 64 GiB at least."""
    cluster = resolve_cluster("8x40GB")
    assert (cluster.nodes, cluster.world_size, cluster.device.memory_bytes) == (1, 8, int(39.52 * 2**30))
    assert (cluster.host_memory_bytes, cluster.device.supports("bf16")) == (3 * 8 * cluster.device.memory_bytes, True)
    assert resolve_cluster("1x8GiB").host_memory_bytes == 64 * 2**30
    named = resolve_cluster("8xa100-40gb:2", memory_limit_bytes=2**30)
    assert (named.name, named.world_size, named.device.memory_bytes) == ("8xa100-40gb:2", 16, 2**30)
    assert named.device.source == device_preset("a100-40gb").source
    assert is_cluster_name("2x24GB:4")
    assert not is_cluster_name("2x24GB:4/mine.toml")


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(FILE)
    cluster = resolve_cluster(str(file))
    assert (cluster.name, cluster.world_size, cluster.device.name) == ("mine", 12, "a100-80gb")


def test_file_with_a_device_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    table = '[device]\nname = "chip"\nmemory_bytes = 64e9\npeak_flops = { bf16 = 100e12 }\n'
    file.write_text(FILE.replace('device = "a100-80gb"\n', "") + table)
    assert resolve_cluster(str(file)).device.peak_flops == {"bf16": 1e14}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("nodes = 3", "nodes = 0", "nodes"),
        ("nodes = 3", "nodes = 2.5", "nodes"),
        ("cores_per_node = 64", "", "cores_per_node"),
        ("intra_node_bandwidth = 300e9", 'intra_node_bandwidth = "fast"', "intra_node_bandwidth"),
        ("nodes = 3", "nodes =", "is not TOML"),
        ('device = "a100-80gb"', "", "device"),
        ("cores_per_node = 64", "cores_per_node = 64\nlink_domain_sze = 8", "link_domain_sze: .*did you mean link_domain_size"),
        ('"a100-80gb"', "{ memory_bytes = 8e10, host_lnk = 1e9 }", r"device.host_lnk: .*did you mean host_link"),
        ('"a100-80gb"', "{ memory_bytes = 8e10, peak_flops = { bfloat16 = 1e14 } }", r"peak_flops.bfloat16: .*bf16"),
        ("intra_node_bandwidth = 300e9", "intra_node_bandwidth = 300", 'intra_node_bandwidth: 300 bytes/s .*"300GB/s"'),
        ("host_memory_bytes = 500_000_000_000", "host_memory_bytes = 500", 'host_memory_bytes: 500 bytes .*"500GB"'),
        ('"a100-80gb"', "{ memory_bytes = 8e10, peak_flops = { bf16 = 312 } }", 'bf16: 312 FLOP/s .*"312TFLOP/s"'),
    ],
)
def test_bad_file_is_named_with_its_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ClusterFormatError, match=said) as caught:
        resolve_cluster(str(file))
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"text": "dgx-a10"}, UnknownNameError),
        ({"text": "dgx-a100:0"}, ClusterFormatError),
        ({"text": "dgx-a100:many"}, ClusterFormatError),
        ({"text": "dgx-a100:"}, ClusterFormatError),
        ({"text": "nowhere.toml"}, ClusterFormatError),
        ({"text": "2x24"}, UnknownNameError),
        ({"text": "0x24GB"}, UnknownNameError),
        ({"text": "2x0GB"}, UnknownNameError),
        ({"text": "2x24GB:none"}, ClusterFormatError),
        ({"text": "ray"}, ClusterFormatError),
        ({"text": "dgx-a100", "ranks": 4}, ClusterFormatError),
        ({"text": "local", "memory_limit_bytes": 0}, ClusterFormatError),
    ],
)
def test_bad_text(arguments: dict[str, Any], error: type[SearchSpaceError]) -> None:
    with pytest.raises(error) as caught:
        resolve_cluster(**arguments)
    assert "\n" not in str(caught.value)


def test_a_live_description_answers_ray() -> None:
    live = resolve_cluster("dgx-h100")
    assert resolve_cluster("ray", live=live) is live


@pytest.mark.parametrize("changes", [{"kind": "tpu"}, {"memory_bytes": 0}, {"peak_flops": {"bf16": -1.0}}])
def test_device_refuses_what_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ClusterFormatError):
        DeviceSpec(**({"name": "x", "kind": "cuda", "memory_bytes": 1, "peak_flops": {}} | changes))


def test_part_of_a_live_cluster_lies_evenly_on_as_few_nodes_as_possible() -> None:
    live = resolve_cluster("dgx-a100:3")
    parts = [(1, 1), (8, 1), (10, 2), (16, 2), (24, 3)]
    for ranks, nodes in parts:
        part = resolve_cluster("ray", ranks, live=live)
        assert (part.nodes, part.world_size) == (nodes, ranks)
    for ranks in (11, 25, 32):
        with pytest.raises(ClusterFormatError, match=f"ranks: {ranks} cannot be laid out evenly on 3 nodes of 8 devices; give"):
            resolve_cluster("ray", ranks, live=live)


RACKS = FILE.replace("nodes = 3", "nodes = 4").replace("cores_per_node", "link_domain_size = 8\ncores_per_node")


def test_a_link_domain_has_several_nodes(tmp_path: Path) -> None:
    file = tmp_path / "racks.toml"
    file.write_text(RACKS)
    cluster = resolve_cluster(str(file))
    assert (cluster.link_domain_size, cluster.nodes_per_link_domain, cluster.linked_devices) == (8, 2, 8)
    assert cluster.link_domain_text == "link domain"
    assert from_plain(ClusterSpec, json.loads(json.dumps(to_plain(cluster)))) == cluster
    part = resolve_cluster("ray", 4, live=dataclasses.replace(cluster, nodes=4))
    assert (part.nodes, part.devices_per_node, part.linked_devices, part.link_domain_text) == (1, 4, 4, "node")
    narrow = with_shape(cluster, 4, 1)
    assert (narrow.link_domain_size, narrow.nodes_per_link_domain, narrow.linked_devices) == (2, 2, 2)
    file.write_text(FILE)
    plain = resolve_cluster(str(file))
    assert (plain.link_domain_size, plain.nodes_per_link_domain, plain.linked_devices) == (None, 1, 4)
    assert (plain.link_domain_text, with_shape(plain, 1, 2).link_domain_size) == ("node", None)


@pytest.mark.parametrize("name", ["gb200-nvl72", "4xgb200", "4xGB300"])
@pytest.mark.parametrize(("nodes", "linked"), [(1, 4), (18, 72), (36, 72)])
def test_a_rack_is_one_link_domain(name: str, nodes: int, linked: int) -> None:
    cluster = resolve_cluster(f"{name}:{nodes}")
    assert (cluster.world_size, cluster.linked_devices, cluster.link_domain_size) == (4 * nodes, linked, 72)


@pytest.mark.parametrize(
    ("size", "message"),
    [("6", "6 is not a multiple of the 4 devices of a node; give"), ("0", "link_domain_size: 0 is not a positive number")],
)
def test_a_link_domain_that_cannot_be_is_refused(tmp_path: Path, size: str, message: str) -> None:
    file = tmp_path / "racks.toml"
    file.write_text(RACKS.replace("link_domain_size = 8", f"link_domain_size = {size}"))
    with pytest.raises(ClusterFormatError, match=message):
        resolve_cluster(str(file))


MIXED = """
devices_per_node = 4
intra_node_bandwidth = 300e9
inter_node_bandwidth = 25e9
host_memory_bytes = 500_000_000_000
cores_per_node = 64

[[nodes]]
count = 2
device = "h100"
ray_resource = "accelerator_type:H100"

[[nodes]]
count = 1
device = "a100-40gb"
inter_node_bandwidth = 10e9
cores_per_node = 32
"""


def test_nodes_that_differ_have_the_least_in_common(tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(MIXED)
    cluster = resolve_cluster(str(tmp_path / "mixed.toml"))
    assert (cluster.nodes, cluster.world_size) == (3, 12)
    assert [cluster.group_of_rank(rank) for rank in (0, 7, 8, 11)] == [0, 0, 1, 1]
    assert cluster.device.memory_bytes == device_preset("a100-40gb").memory_bytes
    assert cluster.most_memory_bytes == device_preset("h100").memory_bytes
    assert cluster.device.peak_flops["bf16"] == 312e12
    assert "fp8" not in cluster.device.peak_flops
    assert (cluster.inter_node_bandwidth, cluster.intra_node_bandwidth, cluster.cores_per_node) == (10e9, 300e9, 32)
    assert from_plain(ClusterSpec, json.loads(json.dumps(to_plain(cluster)))) == cluster
    limited = resolve_cluster(str(tmp_path / "mixed.toml"), memory_limit_bytes=50 * 2**30)
    assert [group.device.memory_bytes for group in limited.groups] == [50 * 2**30, cluster.device.memory_bytes]


def test_nodes_in_tables_that_are_alike_are_a_cluster_as_ever(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(FILE)
    table = FILE.replace("nodes = 3\n", "") + "[[nodes]]\ncount = 1\n[[nodes]]\ncount = 2\n"
    (tmp_path / "tables.toml").write_text(table)
    one, other = (resolve_cluster(str(tmp_path / name)) for name in ("one.toml", "tables.toml"))
    assert dataclasses.replace(other, name=one.name) == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("count = 2", ""), r"nodes\[0\].count: is missing"),
        (('device = "a100-40gb"', 'device = "a100"'), "unknown|a100"),
        (
            ("count = 1", "count = 1\ndevices_per_node = 8"),
            r"nodes\[1\].devices_per_node: nodes with different numbers of devices",
        ),
        (
            ("count = 1", "count = 1\nlink_domain_size = 8"),
            r"nodes\[1\].link_domain_size: nodes with different link domains are not supported",
        ),
        (
            ("cores_per_node = 64", "cores_per_node = 64\nlink_domain_size = 12"),
            "a link domain of 3 nodes has nodes of two kinds",
        ),
        (("count = 1", "count = 0"), r"nodes\[1\].count: 0 is not a positive number"),
        (('device = "a100-40gb"', 'device = {kind = "cpu", memory_bytes = 1e9, peak_flops = {bf16 = 1e12}}'), "some have GPUs"),
    ],
)
def test_what_is_wrong_with_a_table_of_nodes_is_told(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / "mixed.toml").write_text(MIXED.replace(*change))
    with pytest.raises(SearchSpaceError, match=message):
        resolve_cluster(str(tmp_path / "mixed.toml"))


def test_a_part_of_nodes_that_differ_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(MIXED)
    with pytest.raises(ClusterFormatError, match="nodes: 2 are not the 3 of its groups, which differ"):
        dataclasses.replace(resolve_cluster(str(tmp_path / "mixed.toml")), nodes=2)
