"""Clusters by name: this machine, presets from public data sheets, a number of cards, a TOML file, a live Ray cluster."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from search_spaces.clusters.cards import machines_of_cards, unknown_cards
from search_spaces.clusters.cluster import ClusterSpec, DeviceSpec, NodeGroup, mixed_cluster, with_shape
from search_spaces.clusters.devices import (
    device_of,
    device_preset,
    devices_named,
    link_of,
    link_of_gpus,
    missing,
    numa_nodes,
    read_count,
    read_number,
    read_optional_count,
    require_known,
)
from search_spaces.errors import ClusterFormatError, SearchSpaceError
from search_spaces.file_kinds import CLUSTER_FILE, mistaken
from search_spaces.kernels import PACKAGES, installed_kernels
from search_spaces.preset_files import plain_name, preset_tables, unknown_name
from search_spaces.quantities import Quantity

REMEDY = "give the path of a TOML file, local, or NAME:NODES"
CPU_PEAK_FLOPS_PER_CORE = 1e11
"""fp32 FLOP/s of a core, a rough estimate: 3 GHz x 2 fused multiply-add units x 8 lanes x 2. The peak for MFU on a CPU."""
CPU_MEMORY_BANDWIDTH = 2e10
"""Memory bandwidth of a machine in bytes/s, shared by its ranks: a rough estimate for two DDR4 channels."""
NODE_KEYS = (
    "device", "intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node", "ray_resource"
)  # fmt: skip
"""The keys that both a cluster's file and its [[nodes]] may have."""


def cluster_preset_names() -> tuple[str, ...]:
    """The names that `resolve_cluster` accepts in addition to `local`, `ray` and numbers of cards."""
    return tuple(_machines())


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


def cluster_source(preset: str) -> str:
    """Where the figures of a preset come from."""
    return str(_machines()[preset]["source"])


def unstated_figures(preset: str) -> tuple[str, ...]:
    """The fields of a preset's `ClusterSpec` that no page states."""
    return tuple(_machines()[preset].get("assumed", ()))


def is_cluster_name(text: str) -> bool:
    """Whether `text` is `local` or names a preset or cards, and so cannot be a path."""
    name, colon, nodes = text.partition(":")
    if colon and not re.fullmatch(r"[1-9][0-9]{0,5}", nodes):
        return False
    return text == "local" or cluster_preset_named(name) is not None or machines_of_cards(name) is not None


@lru_cache(maxsize=1024)
def cluster_preset_named(text: str) -> str | None:
    """The preset that `text` means, in any spelling: `DGX_H100`, `ND96isr_H100_v5`, `ml.p5.48xlarge`; None: there is none."""
    names = {plain_name(name): name for name in cluster_preset_names()}
    names |= {plain.removeprefix("standard"): name for plain, name in names.items()}
    plain = plain_name(text)
    return names.get(plain) or names.get(re.sub(r"^(ml|aws|azure|gcp|oci|lambda)", "", plain))


@cache
def _machines() -> dict[str, dict[str, Any]]:
    """The tables of clusters and of clouds' types of instances, with the links of their devices."""
    clusters, types = preset_tables("clusters"), preset_tables("instances")
    fields = ("device", "devices_per_node", "cores_per_node", "host_memory_bytes", "inter_node_bandwidth", "assumed")
    tables = {**clusters, **{name: clusters[preset] for name, preset in types["presets"].items()}}
    for vendor_page, rows in types["machines"].items():
        tables |= {name: {"source": vendor_page, **dict(zip(fields, row, strict=False))} for name, row in rows.items()}
    return {name: {"intra_node_bandwidth": link_of(table["device"])[1], **table} for name, table in tables.items()}


def local_cluster(
    ranks: int | None = None,
    memory_limit_bytes: int | None = None,
    gpu_name: str | None = None,
    gpu_count: int = 0,
    gpu_memory_bytes: int = 0,
) -> ClusterSpec:
    """This machine: one rank per GPU if GPUs are passed (this package cannot detect them itself), else ranks on its cores.

    Raises:
        ClusterFormatError: `ranks` is not positive, or exceeds four per core or the number of GPUs.
    """
    cores = _cores()
    # Maximum ranks per core of `local`: more would only take turns.
    ranks_per_core = 4
    most = gpu_count or ranks_per_core * cores
    if ranks is None:
        ranks = gpu_count or min(2, cores)
    if not 1 <= ranks <= most:
        limit = f"{gpu_count} GPUs" if gpu_count else f"{cores} cores at {ranks_per_core} ranks a core"
        raise ClusterFormatError("ranks", f"{ranks} is not between 1 and {most} ({limit})", f"use at most {most} ranks")
    device = _gpu(gpu_name or "gpu", gpu_memory_bytes) if gpu_count else _cpu_share(ranks, cores)
    # Bytes/s between two ranks of this machine through gloo, a rough estimate.
    loopback_bandwidth = 2e9
    cluster = ClusterSpec(
        name="local",
        nodes=1,
        devices_per_node=ranks,
        device=device,
        intra_node_bandwidth=link_of_gpus(device.name) if gpu_count else loopback_bandwidth,
        inter_node_bandwidth=loopback_bandwidth,
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
        require_known("", table, (*cluster_keys, *NODE_KEYS))
        return _mixed(name, table, nodes) if isinstance(nodes, list) else _cluster(name, table, nodes)
    except ClusterFormatError as error:
        raise ClusterFormatError(f"{file}: {error.field}", error.problem, error.remedy) from None


def _described(text: str, live: ClusterSpec | None) -> ClusterSpec:
    if text in ("ray", "local"):
        if live is None:
            raise ClusterFormatError("ray", "is described only where something runs on it", "give NAME:NODES or a TOML file")
        return live
    name, colon, nodes = text.partition(":")
    preset = cluster_preset_named(name)
    cards = None if preset else machines_of_cards(name)
    if preset or cards is not None:
        if colon and re.fullmatch(r"[1-9][0-9]{0,5}", nodes) is None:
            raise ClusterFormatError(text, f"{nodes!r} is not a number of nodes", f"write {name}:4 for 4 nodes")
        if cards is not None:
            if colon and cards.nodes > 1:
                raise ClusterFormatError(text, "states the number of nodes twice", f"write {cards.name}")
            return replace(cards, name=f"{cards.name}:{nodes}", nodes=int(nodes)) if colon else cards
        return _cluster(f"{preset}{colon}{nodes}", _machines()[str(preset)], int(nodes or 1))
    if Path(text).expanduser().exists() or text.endswith(".toml") or "/" in text:
        return read_cluster_file(text)
    raise unknown_cluster(text)


def unknown_cluster(text: str) -> SearchSpaceError:
    """The error for a text that names no cluster: what it lacks, or which names are near."""
    name = text.partition(":")[0]
    if devices := devices_named(name):
        remedy = f"write 1x{devices[0]} for a single one, 8x{devices[0]} for a machine with 8, 8x{devices[0]}:4 for 4 machines"
        return ClusterFormatError("cluster", f"{text} does not state how many devices a machine has", remedy)
    if (error := unknown_cards(name)) is not None:
        return error
    otherwise = "or give NAME:NODES, COUNTxMEMORY or COUNTxDEVICE (2x24GB, 8xa100-80gb), or the path of a TOML file"
    names = ("local", "ray", *cluster_preset_names())
    return unknown_name("cluster preset", name, names, otherwise, listed_by="autotune clusters")


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
            require_known("", node_table, ("count", *NODE_KEYS))
            groups.append(_group(f"{name}-{index}", {**table, **node_table}))
        except ClusterFormatError as error:
            raise ClusterFormatError(f"nodes[{index}].{error.field}", error.problem, error.remedy) from None
    cluster = mixed_cluster(name, read_count(table, "devices_per_node"), groups)
    return replace(cluster, kernel_packages=_packages(table), link_domain_size=read_optional_count(table, "link_domain_size"))


def _group(name: str, table: Mapping[str, Any]) -> NodeGroup:
    return NodeGroup(
        nodes=read_count(table, "count"),
        device=_stated_device(name, table),
        intra_node_bandwidth=read_number(table, "intra_node_bandwidth", Quantity.RATE),
        inter_node_bandwidth=read_number(table, "inter_node_bandwidth", Quantity.RATE),
        host_memory_bytes=read_count(table, "host_memory_bytes", Quantity.BYTES),
        cores_per_node=read_count(table, "cores_per_node"),
        ray_resource=str(table.get("ray_resource", "")),
    )


def _stated_device(name: str, table: Mapping[str, Any]) -> DeviceSpec:
    device = table.get("device")
    if isinstance(device, Mapping):
        return device_of(str(device.get("name", name)), device)
    return device_preset(str(device)) if device is not None else missing("device")


def _cluster(name: str, table: Mapping[str, Any], nodes: Any) -> ClusterSpec:
    return ClusterSpec(
        name=name,
        nodes=read_count({"nodes": nodes}, "nodes"),
        devices_per_node=read_count(table, "devices_per_node"),
        device=_stated_device(name, table),
        intra_node_bandwidth=read_number(table, "intra_node_bandwidth", Quantity.RATE),
        inter_node_bandwidth=read_number(table, "inter_node_bandwidth", Quantity.RATE),
        host_memory_bytes=read_count(table, "host_memory_bytes", Quantity.BYTES),
        cores_per_node=read_count(table, "cores_per_node"),
        numa_nodes=read_optional_count(table, "numa_nodes"),
        kernel_packages=_packages(table),
        link_domain_size=read_optional_count(table, "link_domain_size"),
    )


def _packages(table: Mapping[str, Any]) -> dict[str, str] | None:
    if (versions := table.get("kernel_packages")) is None:
        return None
    modules = [package.module for package in PACKAGES.values()]
    if not isinstance(versions, Mapping) or not set(versions) <= {*modules}:
        remedy = f'write kernel_packages = {{ {modules[0]} = "0.8.5" }}, with any of {", ".join(modules)}'
        raise ClusterFormatError("kernel_packages", f"{versions!r} is not a table of packages and versions", remedy)
    return {str(module): str(version) for module, version in versions.items()}


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
    """The data sheet's figures if the driver's device name contains a preset's words; else only its memory."""
    devices = [device_preset(preset) for preset in devices_named(name, whole=False)]
    if not devices:
        return DeviceSpec(name=name, kind="cuda", memory_bytes=memory_bytes, peak_flops={}, source="the driver")
    nearest = min(devices, key=lambda device: abs(device.memory_bytes - memory_bytes))
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
