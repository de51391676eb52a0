"""Clusters by name: this machine, presets from public data sheets, a number of cards, a TOML file, a live Ray cluster."""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.clusters.cluster import PCIE_COPIES, ClusterSpec, DeviceSpec, NodeGroup, mixed_cluster, with_shape
from search_spaces.clusters.numa import numa_nodes
from search_spaces.errors import ClusterFormatError
from search_spaces.file_kinds import CLUSTER_FILE, mistaken
from search_spaces.kernels import PACKAGES, installed_kernels
from search_spaces.preset_files import preset_tables, unknown_name
from search_spaces.quantities import Quantity, read_quantity

REMEDY = "give the path of a TOML file, local, or NAME:NODES"
RANKS_PER_CORE = 4
"""Maximum ranks per core of `local`: more would only take turns."""
CPU_PEAK_FLOPS_PER_CORE = 1e11
"""fp32 FLOP/s of a core, a rough estimate: 3 GHz x 2 fused multiply-add units x 8 lanes x 2. The peak for MFU on a CPU."""
CPU_MEMORY_BANDWIDTH = 2e10
"""Memory bandwidth of a machine in bytes/s, shared by its ranks: a rough estimate for two DDR4 channels."""
LOOPBACK_BANDWIDTH = 2e9
"""Bytes/s between two ranks of this machine through gloo, a rough estimate."""
NODE_KEYS = (
    "device", "intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node", "ray_resource"
)  # fmt: skip
"""The keys that both a cluster's file and its [[nodes]] may have."""
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
LEAST = {Quantity.RATE: (1e4, "GB/s"), Quantity.BYTES: (1e6, "GB"), Quantity.FLOPS: (1e7, "TFLOP/s")}
"""A smaller number was written in another unit than bytes, bytes/s or FLOP/s; the unit in which it is usually stated."""


def cluster_preset_names() -> tuple[str, ...]:
    """The names that `resolve_cluster` accepts in addition to `local` and `ray`."""
    return tuple(preset_tables("clusters"))


def device_preset(name: str) -> DeviceSpec:
    """A device from its public data sheet.

    Raises:
        UnknownNameError: there is no such preset.
    """
    devices = preset_tables("devices")
    if name not in devices:
        raise unknown_name("device preset", name, devices)
    return _device(name, devices[name])


def device_family(preset: str) -> frozenset[str]:
    """The words that the name of such a device contains: those of the preset without its memory size and board."""
    return frozenset(word for word in preset.split("-") if word != "pcie" and not re.fullmatch(r"[0-9]+gb", word))


def resolve_cluster(
    text: str, ranks: int | None = None, memory_limit_bytes: int | None = None, live: ClusterSpec | None = None
) -> ClusterSpec:
    """The cluster that `text` names: `local`, `NAME` or `NAME:NODES`, cards (`2x24GB`), the path of a TOML file, or `ray`.

    `ranks` sets the ranks of `local`. For `ray` it selects a part of the cluster: as few nodes as possible, equally many ranks
    on each. Otherwise it must equal the number of devices. `memory_limit_bytes` lowers the memory of each device. `live` is the
    cluster that the caller, who may import torch and ray, found: used for `ray`, and for `local` if this machine has GPUs.

    Raises:
        UnknownNameError: it is neither a preset nor a path.
        ClusterFormatError: the text or the file cannot be read, or there are too many ranks.
    """
    if text == "local" and live is None:
        return local_cluster(ranks, memory_limit_bytes)
    cluster = _described(text, live)
    if text == "ray" and ranks is not None:
        cluster = _part(cluster, ranks)
    if ranks is not None and ranks != cluster.world_size:
        raise ClusterFormatError(
            "ranks",
            f"{ranks} is not the {cluster.world_size} devices of {text}",
            "leave it out, or change the nodes (NAME:NODES)",
        )
    return _limited(cluster, memory_limit_bytes)


def is_cluster_name(text: str) -> bool:
    """Whether `text` is `local` or names a preset or cards, and so cannot be a path."""
    name = text.partition(":")[0]
    is_preset = name in preset_tables("clusters") or machine_of_cards(name, device_preset) is not None
    return text == "local" or (is_preset and re.fullmatch(r"(:[1-9][0-9]{0,5})?", text[len(name) :]) is not None)


def local_cluster(
    ranks: int | None = None,
    memory_limit_bytes: int | None = None,
    gpu_name: str | None = None,
    gpu_count: int = 0,
    gpu_memory_bytes: int = 0,
) -> ClusterSpec:
    """This machine: one rank per GPU if GPUs are passed (this package cannot detect them itself), else ranks on its cores.

    Raises:
        ClusterFormatError: `ranks` is not positive, or exceeds `RANKS_PER_CORE` per core or the number of GPUs.
    """
    cores = _cores()
    most = gpu_count or RANKS_PER_CORE * cores
    if ranks is None:
        ranks = gpu_count or min(2, cores)
    if not 1 <= ranks <= most:
        limit = f"{gpu_count} GPUs" if gpu_count else f"{cores} cores at {RANKS_PER_CORE} ranks a core"
        raise ClusterFormatError("ranks", f"{ranks} is not between 1 and {most} ({limit})", f"use at most {most} ranks")
    device = _gpu(gpu_name or "gpu", gpu_memory_bytes) if gpu_count else _cpu_share(ranks, cores)
    cluster = ClusterSpec(
        name="local",
        nodes=1,
        devices_per_node=ranks,
        device=device,
        intra_node_bandwidth=3.1e10 if gpu_count else LOOPBACK_BANDWIDTH,
        inter_node_bandwidth=LOOPBACK_BANDWIDTH,
        host_memory_bytes=host_memory_bytes(),
        cores_per_node=cores,
        numa_nodes=len(numa_nodes()) or None,
        kernel_packages=installed_kernels() if gpu_count else None,
    )
    return _limited(cluster, memory_limit_bytes)


def read_cluster_file(path: str | Path) -> ClusterSpec:
    """The cluster of a TOML file with the fields of ClusterSpec; `device` is a preset's name or a table of DeviceSpec's fields.

    If nodes differ, [[nodes]] tables replace `nodes`, each with a `count` and the fields in which it differs.

    Raises:
        ClusterFormatError: the file cannot be read, or a key is missing or of the wrong type; the message names file and key.
    """
    file = Path(path).expanduser()
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ClusterFormatError(str(file), reason, REMEDY) from None
    except ValueError as error:
        if other := mistaken(file, CLUSTER_FILE):
            raise ClusterFormatError(str(file), other, REMEDY) from None
        raise ClusterFormatError(str(file), f"is not TOML ({error})", "correct the file") from None
    if "devices_per_node" not in table and (other := mistaken(file, CLUSTER_FILE)):
        raise ClusterFormatError(str(file), other, REMEDY)
    name, nodes = str(table.get("name", file.stem)), table.get("nodes", 1)
    try:
        cluster_keys = ("name", "nodes", "devices_per_node", "numa_nodes", "kernel_packages", "link_domain_size")
        _require_known("", table, (*cluster_keys, *NODE_KEYS))
        return _mixed(name, table, nodes) if isinstance(nodes, list) else _cluster(name, table, nodes)
    except ClusterFormatError as error:
        raise ClusterFormatError(f"{file}: {error.field}", error.problem, error.remedy) from None


def _described(text: str, live: ClusterSpec | None) -> ClusterSpec:
    if text in ("ray", "local"):
        if live is None:
            raise ClusterFormatError("ray", "is described only where something runs on it", "give NAME:NODES or a TOML file")
        return live
    name, colon, nodes = text.partition(":")
    presets, cards = preset_tables("clusters"), machine_of_cards(name, device_preset)
    if name in presets or cards is not None:
        if colon and re.fullmatch(r"[1-9][0-9]{0,5}", nodes) is None:
            raise ClusterFormatError(text, f"{nodes!r} is not a number of nodes", f"write {name}:4 for 4 nodes")
        count = int(nodes or 1)
        return replace(cards, name=text, nodes=count) if cards is not None else _cluster(text, presets[name], count)
    if Path(text).expanduser().exists() or text.endswith(".toml") or "/" in text:
        return read_cluster_file(text)
    otherwise = "or give NAME:NODES, COUNTxMEMORY or COUNTxDEVICE (2x24GB, 8xa100-80gb), or the path of a TOML file"
    raise unknown_name("cluster preset", name, ("local", "ray", *presets), otherwise)


def _part(cluster: ClusterSpec, ranks: int) -> ClusterSpec:
    """A part of the cluster with this many devices: on as few nodes as possible, equally many on each."""
    most = cluster.devices_per_node
    fitting = (nodes for nodes in range(1, cluster.nodes + 1) if ranks % nodes == 0 and 1 <= ranks // nodes <= most)
    nodes = next(fitting, None)
    if nodes is None:
        problem = f"{ranks} cannot be laid out evenly on {cluster.nodes} nodes of {most} devices"
        raise ClusterFormatError("ranks", problem, f"give at most {most}, or a multiple of it up to {cluster.world_size}")
    return with_shape(cluster, nodes, ranks // nodes)


def _mixed(name: str, table: Mapping[str, Any], nodes: list[Any]) -> ClusterSpec:
    """A cluster of [[nodes]] tables. Fields that a table omits are taken from the cluster."""
    groups = []
    for index, node_table in enumerate(nodes):
        if not isinstance(node_table, Mapping):
            raise ClusterFormatError("nodes", f"{node_table!r} is not a table", "write [[nodes]] and a count below it")
        for field, plural in (("devices_per_node", "numbers of devices"), ("link_domain_size", "link domains")):
            if field in node_table:
                problem = f"nodes with different {plural} are not supported"
                raise ClusterFormatError(f"nodes[{index}].{field}", problem, "write it once, above the [[nodes]] tables")
        try:
            _require_known("", node_table, ("count", *NODE_KEYS))
            groups.append(_group(f"{name}-{index}", {**table, **node_table}))
        except ClusterFormatError as error:
            raise ClusterFormatError(f"nodes[{index}].{error.field}", error.problem, error.remedy) from None
    cluster = mixed_cluster(name, _count(table, "devices_per_node"), groups)
    return replace(cluster, kernel_packages=_packages(table), link_domain_size=_optional_count(table, "link_domain_size"))


def _group(name: str, table: Mapping[str, Any]) -> NodeGroup:
    return NodeGroup(
        nodes=_count(table, "count"),
        device=_stated_device(name, table),
        intra_node_bandwidth=_number(table, "intra_node_bandwidth", Quantity.RATE),
        inter_node_bandwidth=_number(table, "inter_node_bandwidth", Quantity.RATE),
        host_memory_bytes=_count(table, "host_memory_bytes", Quantity.BYTES),
        cores_per_node=_count(table, "cores_per_node"),
        ray_resource=str(table.get("ray_resource", "")),
    )


def _stated_device(name: str, table: Mapping[str, Any]) -> DeviceSpec:
    device = table.get("device")
    if isinstance(device, Mapping):
        return _device(str(device.get("name", name)), device)
    return device_preset(str(device)) if device is not None else _missing("device")


def _cluster(name: str, table: Mapping[str, Any], nodes: Any) -> ClusterSpec:
    return ClusterSpec(
        name=name,
        nodes=_count({"nodes": nodes}, "nodes"),
        devices_per_node=_count(table, "devices_per_node"),
        device=_stated_device(name, table),
        intra_node_bandwidth=_number(table, "intra_node_bandwidth", Quantity.RATE),
        inter_node_bandwidth=_number(table, "inter_node_bandwidth", Quantity.RATE),
        host_memory_bytes=_count(table, "host_memory_bytes", Quantity.BYTES),
        cores_per_node=_count(table, "cores_per_node"),
        numa_nodes=_optional_count(table, "numa_nodes"),
        kernel_packages=_packages(table),
        link_domain_size=_optional_count(table, "link_domain_size"),
    )


def _device(name: str, table: Mapping[str, Any]) -> DeviceSpec:
    keys = ("name", "kind", "memory_bytes", "peak_flops", "memory_bandwidth", "host_link", "source")
    _require_known("device.", table, keys)
    flops = table.get("peak_flops", {})
    if not isinstance(flops, Mapping):
        raise ClusterFormatError("peak_flops", f"{flops!r} is not a table", "write peak_flops = { bf16 = 312e12 }")
    _require_known("peak_flops.", flops, PRECISIONS)
    return DeviceSpec(
        name=name,
        kind=str(table.get("kind", "cuda")),
        memory_bytes=_count(table, "memory_bytes", Quantity.BYTES),
        peak_flops={str(precision): _number(flops, precision, Quantity.FLOPS) for precision in flops},
        memory_bandwidth=_number(table, "memory_bandwidth", Quantity.RATE) if "memory_bandwidth" in table else None,
        host_link=_number(table, "host_link", Quantity.RATE) if "host_link" in table else PCIE_COPIES,
        source=str(table.get("source", "")),
    )


def _packages(table: Mapping[str, Any]) -> dict[str, str] | None:
    if (versions := table.get("kernel_packages")) is None:
        return None
    modules = [package.module for package in PACKAGES.values()]
    if not isinstance(versions, Mapping) or not set(versions) <= {*modules}:
        remedy = f'write kernel_packages = {{ {modules[0]} = "0.8.5" }}, with any of {", ".join(modules)}'
        raise ClusterFormatError("kernel_packages", f"{versions!r} is not a table of packages and versions", remedy)
    return {str(module): str(version) for module, version in versions.items()}


def _require_known(prefix: str, table: Mapping[str, Any], allowed_keys: Collection[str]) -> None:
    """Refuse unknown keys: a misspelt one would leave its figure at the default."""
    for key in table:
        if key not in allowed_keys:
            matches = difflib.get_close_matches(key.lower(), allowed_keys, n=1, cutoff=0.5)
            remedy = f"did you mean {matches[0]}?" if matches else f"use {', '.join(allowed_keys)}"
            raise ClusterFormatError(f"{prefix}{key}", "is not a known key", remedy)


def _missing(key: str) -> Any:
    raise ClusterFormatError(key, "is missing", "add this key")


def _number(table: Mapping[str, Any], key: str, quantity: Quantity | None = None) -> float:
    """The number at `key`; a quantity may be a string with its unit."""
    value = table[key] if key in table else _missing(key)
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


def _count(table: Mapping[str, Any], key: str, quantity: Quantity | None = None) -> int:
    value = _number(table, key, quantity)
    if not value.is_integer() and not isinstance(table[key], str):
        raise ClusterFormatError(key, f"{value!r} is not a whole number", "give a positive integer")
    return int(value)


def _optional_count(table: Mapping[str, Any], key: str) -> int | None:
    return _count(table, key) if key in table else None


def _limited(cluster: ClusterSpec, memory_limit_bytes: int | None) -> ClusterSpec:
    """The cluster with each device's memory lowered to the limit."""
    if memory_limit_bytes is None:
        return cluster
    if memory_limit_bytes < 1:
        raise ClusterFormatError("memory limit", f"{memory_limit_bytes} is not positive", "give a positive number of bytes")
    groups = tuple(replace(group, device=_with_limit(group.device, memory_limit_bytes)) for group in cluster.groups)
    return replace(cluster, device=_with_limit(cluster.device, memory_limit_bytes), groups=groups)


def _with_limit(device: DeviceSpec, memory_limit_bytes: int) -> DeviceSpec:
    return replace(device, memory_bytes=min(memory_limit_bytes, device.memory_bytes))


def _gpu(name: str, memory_bytes: int) -> DeviceSpec:
    """The data sheet's figures if the driver's device name contains a preset's words; else only its memory.

    PCIe boards have different peaks from the modules of the same name.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    fitting = [
        device_preset(preset)
        for preset in preset_tables("devices")
        if device_family(preset) <= {*words} and ("pcie" in preset) == ("pcie" in words)
    ]
    if not fitting:
        return DeviceSpec(name=name, kind="cuda", memory_bytes=memory_bytes, peak_flops={}, source="the driver")
    nearest = min(fitting, key=lambda device: abs(device.memory_bytes - memory_bytes))
    return replace(nearest, name=name, memory_bytes=memory_bytes)


def _cpu_share(ranks: int, cores: int) -> DeviceSpec:
    peak = CPU_PEAK_FLOPS_PER_CORE * cores / ranks
    return DeviceSpec(
        name="cpu",
        kind="cpu",
        memory_bytes=host_memory_bytes() // ranks,
        peak_flops={"fp32": peak, "fp64": peak / 2},
        memory_bandwidth=CPU_MEMORY_BANDWIDTH / ranks,
        source="a rough estimate per core; memory as this machine's kernel states it",
    )


def _cores() -> int:
    """Cores that this process may run on, if the system reports them; else all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_bytes() -> int:
    """Main memory, or the control group's limit if that is lower (containers)."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return installed
    return min(installed, int(limit)) if limit.isdigit() else installed


_CARDS = re.compile(r"([1-9][0-9]{0,3})x(.+)")


def machine_of_cards(text: str, device_preset: Callable[[str], DeviceSpec]) -> ClusterSpec | None:
    """One machine of such cards, with the main memory and links assumed below; None: the text does not have this format."""
    match = _CARDS.fullmatch(text)
    memory = re.fullmatch(r"([1-9][0-9]{0,3}(?:\.[0-9]{1,3})?)Gi?B", match[2], re.IGNORECASE) if match else None
    if match is None or (memory is None and match[2] not in preset_tables("devices")):
        return None
    count, device = int(match[1]), _card(match[2], float(memory[1])) if memory else device_preset(match[2])
    return ClusterSpec(
        name=text, nodes=1, devices_per_node=count, device=device,
        intra_node_bandwidth=link_bandwidth(match[2]), inter_node_bandwidth=1.25e9,  # 10 Gbit/s
        host_memory_bytes=max(3 * count * device.memory_bytes, 64 * 2**30),  # 3: typical of machines on sale
        cores_per_node=8 * count,
    )  # fmt: skip


def link_bandwidth(device: str) -> float:
    """Bytes/s between cards of this name: as in the cluster presets that have them."""
    presets = [table["intra_node_bandwidth"] for table in preset_tables("clusters").values() if table["device"] == device]
    # Boards with NVLink that no cluster preset has, in one direction (data sheets of A800 and H100 SXM); for other cards the
    # achievable copy rate of PCIe 4.0 x16.
    other = {"a800": 200e9, "h100-96gb": 450e9}.get(device, 2.5e10)
    return float(max([*presets, other]))


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
