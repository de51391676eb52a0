"""What a trial sets in a rank's process: cores near its device (`numa_binding`), and when Python collects reference cycles."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from search_spaces.clusters.devices import SYSFS, node_of_device, numa_nodes


@contextlib.contextmanager
def bound_to_node(device: torch.device, binds: bool, sysfs: Path = SYSFS) -> Iterator[None]:
    """Run every thread of this process on the cores of one NUMA node inside the block; restore the affinities afterwards.

    Linux allocates memory on the node whose core first writes to it, so a trial's memory is near too. Nothing changes if the
    system has one node or reports none, or if this process may not use any core of the node.
    """
    before = _threads() if binds else {}
    cores = cores_near(device, sysfs) if before else frozenset()
    if not cores:
        yield
        return
    threads = torch.get_num_threads()
    usable = frozenset(os.sched_getaffinity(0))
    try:
        for thread in before:
            _move(thread, cores)
        torch.set_num_threads(min(threads, len(cores)))
        yield
    finally:
        for thread in _threads():  # threads started inside the block get the affinity of the thread that started them
            _move(thread, before.get(thread, usable))
        torch.set_num_threads(threads)


def cores_near(device: torch.device, sysfs: Path = SYSFS) -> frozenset[int]:
    """Return the usable cores of the node that the device is connected to; empty: there is nothing to choose.

    CPU ranks are distributed evenly over the nodes, with consecutive ranks on the same node.
    """
    nodes = numa_nodes(sysfs)
    if len(nodes) < 2 or not hasattr(os, "sched_getaffinity"):
        return frozenset()
    if device.type == "cuda":
        node = node_of_device(_pci_address(device), sysfs)
    else:
        rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        node = [*nodes][rank * len(nodes) // max(ranks, 1)]
    usable = frozenset(os.sched_getaffinity(0))
    local_cores = nodes.get(-1 if node is None else node, frozenset()) & usable
    return frozenset() if local_cores == usable else local_cores


def _pci_address(device: torch.device) -> str:
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _threads() -> dict[int, frozenset[int]]:
    """Thread of this process -> the cores on which it may run. Each has its own set. Empty if the system cannot set it."""
    affinities = {}
    if hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended in the meantime
                affinities[int(thread.name)] = frozenset(os.sched_getaffinity(int(thread.name)))
    return affinities


def _move(thread: int, cores: frozenset[int]) -> None:
    with contextlib.suppress(OSError):
        os.sched_setaffinity(thread, cores)


@contextlib.contextmanager
def collected_by_steps(interval: int) -> Iterator[None]:
    """Disable automatic collection inside the block if `interval` (steps) is not 0; restore it afterwards.

    A full collection runs first, which moves all live objects to the oldest generation: no step scans the model's objects.
    """
    if not interval or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_at(step: int, interval: int) -> None:
    """Collect the young generations if this step is a multiple of `interval`."""
    if interval and step and step % interval == 0:
        # Not the oldest generation: objects that survive are never scanned again, so a collection stays short.
        gc.collect(1)
