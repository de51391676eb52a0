"""Devices: figures of tables, presets from public data sheets, and the names by which people and drivers call them."""

import difflib
import math
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from search_spaces.clusters.cluster import PCIE_COPIES, DeviceSpec
from search_spaces.errors import ClusterFormatError
from search_spaces.preset_files import preset_tables, unknown_name
from search_spaces.quantities import Quantity, read_quantity

LEAST = {Quantity.RATE: (1e4, "GB/s"), Quantity.BYTES: (1e6, "GB"), Quantity.FLOPS: (1e7, "TFLOP/s")}
"""A smaller number was written in another unit than bytes, bytes/s or FLOP/s; the unit in which it is usually stated."""


def device_preset(name: str) -> DeviceSpec:
    """A device from its public data sheet.

    Raises:
        UnknownNameError: there is no such preset.
    """
    devices = preset_tables("devices")
    if name not in devices:
        raise unknown_name("device preset", name, devices)
    return device_of(name, {key: value for key, value in devices[name].items() if key != "link"})


def device_family(preset: str) -> frozenset[str]:
    """The words that the name of such a device contains: those of the preset without its memory size and board."""
    return frozenset(word for word in preset.split("-") if word != "pcie" and not re.fullmatch(r"[0-9]+gb", word))


UNSPECIFIC = {
    "nvidia", "amd", "instinct", "geforce", "tesla", "quadro", "rtx", "gpu", "gpus", "tensor", "core", "card", "cards", "hgx",
    "generation", "graphics", "ampere", "hopper", "blackwell", "server", "edition",
}  # fmt: skip
"""Words of devices' names that distinguish none."""
MODULE = re.compile(r"sxm\d?|oam|hbm\d?e?")
"""Words of boards with the fast links."""


def device_words(text: str) -> frozenset[str]:
    """The words of a device's name, in one spelling: `4090` of `RTX4090`, `a100`, `sxm4` and `40gb` of `A100-SXM4 40 GB`."""
    plain = re.sub(r"(geforce|rtx|tesla|quadro|nvidia)(?=[a-z]?\d)", r"\1 ", text.lower().replace("_", " "))
    plain = re.sub(r"(?<=\d{4})[ -]*ti\b", "ti", re.sub(r"(?<=\d{4})ada", " ada", plain))
    plain = re.sub(r"\b(\d{1,3}) ?gi?b?\b", r"\1gb", plain)
    return frozenset(re.findall(r"[a-z0-9]+", plain)) - UNSPECIFIC


@lru_cache(maxsize=1024)
def devices_named(text: str, whole: bool = True) -> tuple[str, ...]:
    """The presets of devices that the text can mean, the likeliest first: they differ in memory, which the text does not state.

    `whole`: every word has to belong to the name; else words may be left over, as in the names of drivers.
    """
    words = device_words(text)
    sizes = {int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)}
    fitting: dict[str, frozenset[str]] = {}
    for preset in preset_tables("devices"):
        family = device_family(preset) - UNSPECIFIC
        rest = {word for word in words - family - {"pcie"} if not re.fullmatch(r"\d+gb", word) and not MODULE.fullmatch(word)}
        if family <= words and not (whole and rest):
            fitting[preset] = family
    longest = max(map(len, fitting.values()), default=0)
    on_board = [preset for preset, family in fitting.items() if len(family) == longest]
    boards = [preset for preset in on_board if ("pcie" in preset) == ("pcie" in words)]
    if not boards:
        boards = [preset for preset in on_board if link_of(preset)[0].startswith("PCIe")]
    exact = [preset for preset in boards if device_words(preset) == words - {*filter(MODULE.fullmatch, words)}]
    sized = [preset for preset in boards if any(has_nominal_memory(preset, size) for size in sizes)]
    return tuple(exact or sized or ([] if whole and sizes else boards))


def has_nominal_memory(device: str, size: float) -> bool:
    """Whether `size` GB or GiB can mean this preset's memory: of what makers state, drivers report up to 4 % less."""
    memory = device_preset(device).memory_bytes
    return any(abs(memory / unit / size - 1.0) < 0.04 for unit in (2**30, 10**9))


def link_of(device: str) -> tuple[str, float, tuple[float, ...]]:
    """Name and bytes/s of the link between cards of this preset in a machine, and the rates of other machines with them."""
    link = preset_tables("devices")[device].get("link", {"name": "PCIe 4.0 x16", "rate": PCIE_COPIES, "others": [12.5e9]})
    return link["name"], link["rate"], tuple(link.get("others", ()))


def link_of_gpus(driver_name: str) -> float:
    """Bytes/s between GPUs of a machine, by the name that their driver gives them; of an unknown GPU copies over PCIe 4.0."""
    devices = devices_named(driver_name, whole=False)
    return link_of(devices[0])[1] if devices else PCIE_COPIES


def device_of(name: str, table: Mapping[str, Any]) -> DeviceSpec:
    """The device of a table with the fields of DeviceSpec.

    Raises:
        ClusterFormatError: a key is missing, unknown or of the wrong type.
    """
    keys = ("name", "kind", "memory_bytes", "peak_flops", "memory_bandwidth", "host_link", "source")
    require_known("device.", table, keys)
    flops = table.get("peak_flops", {})
    if not isinstance(flops, Mapping):
        raise ClusterFormatError("peak_flops", f"{flops!r} is not a table", "write peak_flops = { bf16 = 312e12 }")
    require_known("peak_flops.", flops, ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"))
    return DeviceSpec(
        name=name,
        kind=str(table.get("kind", "cuda")),
        memory_bytes=read_count(table, "memory_bytes", Quantity.BYTES),
        peak_flops={str(precision): read_number(flops, precision, Quantity.FLOPS) for precision in flops},
        memory_bandwidth=read_number(table, "memory_bandwidth", Quantity.RATE) if "memory_bandwidth" in table else None,
        host_link=read_number(table, "host_link", Quantity.RATE) if "host_link" in table else PCIE_COPIES,
        source=str(table.get("source", "")),
    )


def require_known(prefix: str, table: Mapping[str, Any], allowed_keys: Collection[str]) -> None:
    """Refuse unknown keys: a misspelt one would leave its figure at the default."""
    for key in table:
        if key not in allowed_keys:
            matches = difflib.get_close_matches(key.lower(), allowed_keys, n=1, cutoff=0.5)
            remedy = f"did you mean {matches[0]}?" if matches else f"use {', '.join(allowed_keys)}"
            raise ClusterFormatError(f"{prefix}{key}", "is not a known key", remedy)


def missing(key: str) -> Any:
    """Raise the error for a key that is missing."""
    raise ClusterFormatError(key, "is missing", "add this key")


def read_number(table: Mapping[str, Any], key: str, quantity: Quantity | None = None) -> float:
    """The number at `key`; a quantity may be a string with its unit."""
    value = table[key] if key in table else missing(key)
    if isinstance(value, str) and quantity is not None:
        if (read := read_quantity(quantity, value)) is None:
            raise ClusterFormatError(key, f"{value!r} has no known unit", f"write {quantity}")
        value = read
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ClusterFormatError(key, f"{value!r} is not a positive number", "give a positive number")
    least, unit = LEAST[quantity] if quantity is not None else (0.0, "")
    if value < least:
        problem = f"{value:g} {str(quantity).partition(',')[0]} is implausibly small"
        raise ClusterFormatError(key, problem, f'give a number with its unit as text, such as "{value:g}{unit}"')
    return float(value)


def read_count(table: Mapping[str, Any], key: str, quantity: Quantity | None = None) -> int:
    """The whole number at `key`."""
    value = read_number(table, key, quantity)
    if not value.is_integer() and not isinstance(table[key], str):
        raise ClusterFormatError(key, f"{value!r} is not a whole number", "give a positive integer")
    return int(value)


def read_optional_count(table: Mapping[str, Any], key: str) -> int | None:
    """The whole number at `key`; None: it is absent."""
    return read_count(table, key) if key in table else None


SYSFS = Path("/sys")


def numa_nodes(sysfs: Path = SYSFS) -> Mapping[int, frozenset[int]]:
    """Node -> its cores, by ascending numbers, for nodes that have cores. Empty if the system does not report NUMA nodes."""
    cores_by_node = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        try:
            cores = core_list((folder / "cpulist").read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if cores:
            cores_by_node[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(cores_by_node.items()))


def node_of_device(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """The node to which a device is connected, by its PCI address such as 0000:3b:00.0; None: not reported."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def core_list(text: str) -> frozenset[int]:
    """Cores as Linux lists them: 0-3,8,10-11.

    Raises:
        ValueError: it is not such a list.
    """
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
