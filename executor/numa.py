"""A rank's process on the cores that are near its device (`numa_binding`)."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from search_spaces.numa import SYSFS, node_of_device, numa_nodes


@contextlib.contextmanager
def bound_to_node(device: torch.device, binds: bool, sysfs: Path = SYSFS) -> Iterator[None]:
    """Inside, every thread of this process runs on the cores of one NUMA node; after it, where each ran before.

    Linux gives memory of the node whose core writes to it first, so that what a trial allocates is near, too. Where there is
    one node, or the system tells of none, or of its cores this process may use none, nothing changes.
    """
    before = _threads() if binds else {}
    cores = cores_near(device, sysfs) if before else frozenset()
    if not cores:
        yield
        return
    threads = torch.get_num_threads()
    own = frozenset(os.sched_getaffinity(0))
    try:
        for thread in before:
            _move(thread, cores)
        torch.set_num_threads(min(threads, len(cores)))
        yield
    finally:
        for thread in _threads():  # those that were started meanwhile run where the one that started them did
            _move(thread, before.get(thread, own))
        torch.set_num_threads(threads)


def cores_near(device: torch.device, sysfs: Path = SYSFS) -> frozenset[int]:
    """The cores of the node that the device is connected to, as far as this process may use them; empty: nothing to choose.

    Ranks on the host's cores are spread over the nodes in equal numbers, neighbours on the same one.
    """
    nodes = numa_nodes(sysfs)
    if len(nodes) < 2 or not hasattr(os, "sched_getaffinity"):
        return frozenset()
    node = node_of_device(_pci_address(device), sysfs) if device.type == "cuda" else _node_of_rank(nodes)
    usable = frozenset(os.sched_getaffinity(0))
    near = nodes.get(-1 if node is None else node, frozenset()) & usable
    return frozenset() if near == usable else near


def _node_of_rank(nodes: Mapping[int, frozenset[int]]) -> int:
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
    return [*nodes][rank * len(nodes) // max(ranks, 1)]


def _pci_address(device: torch.device) -> str:
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _threads() -> dict[int, frozenset[int]]:
    """Thread of this process -> the cores on which it may run: each has its own set. Empty where it cannot be chosen."""
    found = {}
    if hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found[int(thread.name)] = frozenset(os.sched_getaffinity(int(thread.name)))
    return found


def _move(thread: int, cores: frozenset[int]) -> None:
    with contextlib.suppress(OSError):
        os.sched_setaffinity(thread, cores)
