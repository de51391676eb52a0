"""Numbers with units, alone and where files have them."""

from pathlib import Path

import pytest

from search_spaces.clusters.presets import read_cluster_file
from search_spaces.errors import ClusterFormatError
from search_spaces.quantities import Quantity, read_quantity

CLUSTER = """
device = {{ memory_bytes = "40GB", peak_flops = {{ bf16 = "312TFLOP/s" }}, memory_bandwidth = "2 TB/s" }}
nodes = 2
devices_per_node = 8
intra_node_bandwidth = "300GB/s"
inter_node_bandwidth = {network}
host_memory_bytes = "1TiB"
cores_per_node = 64
"""


@pytest.mark.parametrize(
    ("quantity", "text", "value"),
    [
        (Quantity.BYTES, "2000000000", 2e9),
        (Quantity.BYTES, "1.5GiB", 1.5 * 2**30),
        (Quantity.BYTES, " 40 gb ", 4e10),
        (Quantity.RATE, "12.5e9", 1.25e10),
        (Quantity.RATE, "100Gbit/s", 1.25e10),
        (Quantity.RATE, "100Gb/s", 1.25e10),
        (Quantity.RATE, "100Gbps", 1.25e10),
        (Quantity.RATE, "25GB/s", 2.5e10),
        (Quantity.RATE, "1GiB/s", 2.0**30),
        (Quantity.FLOPS, "312TFLOP/s", 3.12e14),
        (Quantity.FLOPS, "1PFLOPS", 1e15),
        (Quantity.COUNT, "125M", 1.25e8),
        (Quantity.COUNT, "7B", 7e9),
        (Quantity.BYTES, "40 parsecs", None),
        (Quantity.BYTES, "100Gbit/s", None),
        (Quantity.RATE, "100GB", None),
        (Quantity.BYTES, "-1GB", None),
        (Quantity.BYTES, "", None),
    ],
)
def test_a_number_with_its_unit(quantity: Quantity, text: str, value: float | None) -> None:
    assert read_quantity(quantity, text) == value


def test_a_cluster_file_may_write_units(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(network='"100Gbit/s"'))
    cluster = read_cluster_file(file)
    assert (cluster.intra_node_bandwidth, cluster.inter_node_bandwidth) == (3e11, 1.25e10)
    assert (cluster.host_memory_bytes, cluster.device.memory_bytes) == (2**40, 40_000_000_000)
    assert (cluster.device.peak_flops, cluster.device.memory_bandwidth) == ({"bf16": 3.12e14}, 2e12)


@pytest.mark.parametrize("network", ['"100 parsecs"', '"100GB"'])
def test_a_unit_that_is_not_known_is_refused_with_how_to_write_it(tmp_path: Path, network: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(network=network))
    with pytest.raises(
        ClusterFormatError, match=r"inter_node_bandwidth: .* has no known unit; write bytes/s, or a number with GB/s"
    ):
        read_cluster_file(file)
