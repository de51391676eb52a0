"""Machines in short form: a number of cards with a memory size (`2x24GB`) or of a device with a preset (`8xa100-80gb`)."""

import re
from collections.abc import Callable

from search_spaces.clusters.cluster import ClusterSpec, DeviceSpec
from search_spaces.preset_files import preset_tables

CARDS_FORMAT = "COUNTxMEMORY or COUNTxDEVICE (2x24GB, 8xa100-80gb)"
"""The format of such a machine."""
HOST_MEMORY_FACTOR = 3
"""Main memory as a multiple of the memory of all cards, typical of machines on sale."""
MIN_HOST_MEMORY_BYTES = 64 * 2**30
"""Minimum main memory of a machine in bytes."""
CORES_PER_CARD = 8
"""Processor cores per card."""
PCIE_BANDWIDTH = 2.5e10
"""Bytes/s between cards that no cluster preset has: achievable copy rate of PCIe 4.0 x16."""
NVLINK = {"a800": 200e9, "h100-96gb": 450e9}
"""Devices on boards with NVLink that no cluster preset has -> bytes/s in one direction (data sheets of A800 and H100 SXM)."""
INTER_NODE_BANDWIDTH = 1.25e9
"""Bytes/s between machines: 10 Gbit/s."""
_CARDS = re.compile(r"([1-9][0-9]{0,3})x(.+)")
_MEMORY = re.compile(r"([1-9][0-9]{0,3}(?:\.[0-9]{1,3})?)Gi?B", re.IGNORECASE)


def machine_of_cards(text: str, device_preset: Callable[[str], DeviceSpec]) -> ClusterSpec | None:
    """One machine of such cards, with the main memory and links assumed above; None: the text does not have this format."""
    found = _CARDS.fullmatch(text)
    memory = _MEMORY.fullmatch(found[2]) if found else None
    if found is None or (memory is None and found[2] not in preset_tables("devices")):
        return None
    count, device = int(found[1]), _card(found[2], float(memory[1])) if memory else device_preset(found[2])
    return ClusterSpec(
        name=text, nodes=1, devices_per_node=count, device=device,
        intra_node_bandwidth=link_bandwidth(found[2]), inter_node_bandwidth=INTER_NODE_BANDWIDTH,
        host_memory_bytes=max(HOST_MEMORY_FACTOR * count * device.memory_bytes, MIN_HOST_MEMORY_BYTES),
        cores_per_node=CORES_PER_CARD * count,
    )  # fmt: skip


def link_bandwidth(device: str) -> float:
    """Bytes/s between cards of this name: as in the cluster presets that have them."""
    presets = [table["intra_node_bandwidth"] for table in preset_tables("clusters").values() if table["device"] == device]
    return float(max([*presets, NVLINK.get(device, PCIE_BANDWIDTH)]))


def link_text(cluster: ClusterSpec) -> str:
    """The assumed link between the cards of a machine in short form; empty: another cluster, or one card."""
    if _CARDS.fullmatch(cluster.name.partition(":")[0]) is None or cluster.devices_per_node < 2:
        return ""
    return f"{cluster.intra_node_bandwidth / 1e9:g} GB/s between the cards of a machine (--cluster FILE.toml states another)"


def _card(name: str, memory: float) -> DeviceSpec:
    """A card of which only the memory is known, in GiB (what card makers call GB)."""
    return DeviceSpec(
        name=f"a {name} card", kind="cuda", memory_bytes=int(memory * 2**30), memory_bandwidth=9e11,
        peak_flops={"bf16": 1e14, "fp16": 1e14, "fp32": 2.5e13},
        source="memory as it was said; speed of no card in particular, name a device for its own",
    )  # fmt: skip
