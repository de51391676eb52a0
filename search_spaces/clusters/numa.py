"""The NUMA nodes of this machine, as Linux reports them."""

from collections.abc import Mapping
from pathlib import Path

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
