"""The hardware of a row of a table: its device by name, its links by the source's description."""

import re
from dataclasses import dataclass
from functools import cache

from search_spaces.clusters.cluster import DeviceSpec
from search_spaces.clusters.presets import device_family, device_preset
from search_spaces.preset_files import preset_tables

_RACKS = {"gb200": 72, "gb300": 72}
"""Family -> devices of a link domain, where nothing else is stated."""
_NVL_DOMAIN = re.compile(r"NVL\s?(\d{2,3})", re.IGNORECASE)
_RATE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([TtGg])(?:(b(?:it)?(?:/s|ps)|bE\b|igabit|\b)|B(?:/s|ps))")
"""400 Gb/s, 400Gbps, 3.2 Tb/s, 400G, 100GbE, or bytes: 50 GB/s."""
_GENERATION = re.compile(r"\b(EDR|HDR|NDR|XDR)(\d{3})?\b", re.IGNORECASE)
_GENERATION_RATES = {"edr": 12.5e9, "hdr": 25e9, "ndr": 50e9, "xdr": 100e9}
"""Bytes/s of an InfiniBand port of four lanes, by its generation."""
_COUNT = re.compile(
    r"(?<![\w.-])(\d{1,2})\s*(?:[x×*](?!\w)|[x×*](?=\d)|links?\b|ports?\b|rails?\b|NICs?\b|HCAs?\b|cards?\b|Omni-Path)"
    r"|[x×*]\s*(\d{1,2})(?![\w.])",
    re.IGNORECASE,
)
_PER_DEVICE = re.compile(r"(?:per|/)\s*(?:GPU|device|accelerator)\b", re.IGNORECASE)
_SIZE = re.compile(r"(\d{2,3})\s*G(?:i?B)?\b", re.IGNORECASE)
_WORDS = re.compile(r"[a-z]*\d+[a-z]*|[a-z]+")

_INTRA = {
    "v100": 150e9, "a100": 300e9, "a800": 200e9, "h100": 450e9, "h800": 200e9, "h20": 450e9, "h200": 450e9, "gh200": 450e9,
    "b200": 900e9, "b300": 900e9, "gb200": 900e9, "gb300": 900e9, "mi250x": 350e9, "mi300x": 448e9, "mi325x": 448e9,
    "mi355x": 537.6e9,
}  # fmt: skip
"""Family -> bytes/s that a device sends in its node over the family's own link [data sheets]; others: PCIe."""
_PCIE = 25e9
_INTER = {"v100": 12.5e9, "a100": 6.25e9, "a800": 6.25e9, "mi250x": 25e9}
"""Network bytes/s per device if a table does not state it: 400 Gb/s with Hopper and later families.

Nodes of eight A100 are sold with 200 Gb/s to eight times that: the mean time over that range, uniform in the logarithm, is that
of 470; 400 is a product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHardware:
    """A row's description of its cluster."""

    device: DeviceSpec
    family: str
    devices_per_node: int
    intra: float
    inter: float
    """Of one of `devices_per_node` devices: a link domain."""


@cache
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
    own = _rate(inter, per_node) or _INTER.get(family, 50e9 if family in _INTRA else 12.5e9) * per_node
    domain = _NVL_DOMAIN.search(f"{intra or ''} {gpu_type}")
    linked = int(domain[1]) if domain else _RACKS.get(family, per_node)
    return RowHardware(
        device=device, family=family, devices_per_node=linked, intra=link, inter=own / per_node * linked
    )  # fmt: skip


def network_understood(text: str | None) -> bool:
    """Whether a description of the network states a rate that is read; nothing stated: yes."""
    return not text or _rate(text, 1) is not None


def _rate(text: str | None, per_node: int) -> float | None:
    """Bytes/s of a node; None: not stated, or not understood.

    `1600 Gb/s per node`, `8x400 Gb/s IB per node`, `8x ConnectX-7 400 Gb/s`, `400 Gb/s per GPU`, `4 Omni-Path 100 Gb/s links`,
    `400G x 8`, `8x NDR`, `3.2 Tb/s`, `EFA` (400 Gb/s for each device).
    """
    if not text:
        return None
    found = _RATE.search(text) or _GENERATION.search(text)
    if found is None:
        return 50e9 * per_node if re.search(r"\befa", text, re.IGNORECASE) else None
    if found.re is _RATE:
        one = float(found[1]) * (1e12 if found[2] in "Tt" else 1e9) / (1 if found[3] is None else 8)
    else:
        one = float(found[2]) * 1e9 / 8 if found[2] else _GENERATION_RATES[found[1].lower()]
    beside = text[: found.start()] + " " + text[found.end() :]
    if _PER_DEVICE.search(beside):
        return one * per_node
    count = _COUNT.search(beside)
    return one * int(count[1] or count[2]) if count else one
