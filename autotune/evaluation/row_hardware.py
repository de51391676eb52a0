"""The hardware of a row of a table: its device by name, its links by the source's description."""

import re
from dataclasses import dataclass

from search_spaces.clusters.cluster import DeviceSpec
from search_spaces.clusters.presets import device_family, device_preset
from search_spaces.preset_files import preset_tables

_NVL_DOMAIN = re.compile(r"NVL\s?(\d{2,3})", re.IGNORECASE)
_LINKS = re.compile(
    r"(?:\b(\d+)\s*(?:x|×|links?|Omni-Path)\s*)?(?<![\d.])(\d+(?:\.\d+)?)\s*(Gb/s|Gbps|Gbit/s|GB/s)", re.IGNORECASE
)
_SIZE = re.compile(r"(\d{2,3})\s*G(?:i?B)?\b", re.IGNORECASE)
_WORDS = re.compile(r"[a-z]*\d+[a-z]*|[a-z]+")

_INTRA = {
    "v100": 150e9, "a100": 300e9, "a800": 200e9, "h100": 450e9, "h800": 200e9, "h20": 450e9, "h200": 450e9, "gh200": 450e9,
    "b200": 900e9, "b300": 900e9, "gb200": 900e9, "gb300": 900e9, "mi250x": 350e9, "mi300x": 448e9, "mi325x": 448e9,
    "mi355x": 537.6e9,
}  # fmt: skip
"""Family -> bytes/s that a device sends in its node over the family's own link [data sheets]; others: PCIe."""
_PCIE = 25e9
_INTER = {"v100": 12.5e9, "a100": 25e9, "a800": 25e9, "mi250x": 25e9}
"""Network bytes/s per device if a table does not state it: 200 Gb/s with Ampere; 400 with later families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHardware:
    """A row's description of its cluster."""

    device: DeviceSpec
    family: str
    devices_per_node: int
    intra: float
    inter: float


def find_device(name: str) -> tuple[str, DeviceSpec] | None:
    """The preset whose family the name contains, with the stated memory; None: unknown device."""
    words = _WORDS.findall(name.lower())
    several = [key for key in preset_tables("devices") if len(device_family(key)) > 1]
    families = {key.partition("-")[0] for key in preset_tables("devices") if key not in several}
    family = (
        next((word for word in words if word in families), None)
        or next((key.partition("-")[0] for key in several if device_family(key) <= {*words}), None)
        or ("titan" if "titan" in words else None)
    )
    if family is None:
        return None
    candidates = [key for key in preset_tables("devices") if key.partition("-")[0] == family]
    pcie = "pcie" in words
    right = [key for key in candidates if ("pcie" in key) == pcie] or candidates
    stated = [float(size) for size in _SIZE.findall(name)]
    if not stated:
        return family, device_preset(right[-1] if family == "a100" else right[0])
    nearest = min(right, key=lambda key: abs(device_preset(key).memory_bytes / 2**30 - stated[0]))
    return family, device_preset(nearest)


def row_hardware(
    gpu_type: str, gpus_per_node: int | None, world: int, intra: str | None, inter: str | None
) -> RowHardware | None:
    """The cluster of a row; None: unknown device."""
    found = find_device(gpu_type)
    if found is None:
        return None
    family, device = found
    per_node = gpus_per_node or min(8, world)
    pcie = "pcie" in f"{gpu_type} {intra or ''}".lower()
    link = _PCIE if pcie else _INTRA.get(family, _PCIE)
    network = _rate(inter, per_node) or _INTER.get(family, 50e9 if family in _INTRA else 12.5e9) * per_node
    domain = _NVL_DOMAIN.search(f"{intra or ''} {gpu_type}")
    if domain:
        network, per_node = network / per_node * int(domain[1]), int(domain[1])
    return RowHardware(device=device, family=family, devices_per_node=per_node, intra=link, inter=network)


def _rate(text: str | None, per_node: int) -> float | None:
    """Bytes/s of a node from `1600 Gb/s per node`, `8x400 Gb/s IB per node`, `4 Omni-Path 100 Gb/s links per node`, EFA."""
    if not text:
        return None
    if "efa" in text.lower() and not _LINKS.search(text):
        return 50e9 * per_node
    found = _LINKS.search(text)
    if not found:
        return None
    rate = float(found[2]) * (1e9 if found[3] == "GB/s" else 1e9 / 8)
    return rate * int(found[1] or 1)
