"""What would stop or falsify trials on the nodes of a cluster, from what was found on each."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence

from autotune.cli.finding import Finding
from autotune.text.sizes import bytes_text
from executor.runners.ray.checkup import Checkup, NodeFacts, Unreached

LEAST_SHARED_BYTES = 1 << 30
"""Ray's object store, and the buffers of gloo and NCCL, live in /dev/shm."""
EQUAL = ("python", "ray", "torch", "NCCL", "driver", "autotune")
NEEDED = ("torch", "autotune")
HERE = "here"
"""What the machine of the command is called beside nodes."""


def node_findings(checkup: Checkup, here: Mapping[str, str]) -> list[Finding]:
    """Every check that needs no measurement. `here` has the versions of this process: python, ray, torch, autotune."""
    facts = checkup.facts
    return [
        *_silent(checkup),
        *_versions(facts, here),
        *_installed(facts),
        *(_gloo(facts) if len(facts) > 1 else ()),
        *_nccl(facts),
        *_ports(checkup.unreached, facts),
        *_shared_memory(facts),
        *_locked_memory(facts),
        *_topology(facts),
    ]


def _silent(checkup: Checkup) -> Iterator[Finding]:
    for node in (node for node in checkup.nodes if not node.alive):
        remedy = "start Ray on it again; a supervisor does, see docs/deploy/by-hand.md"
        yield Finding(name=f"node {node.name}", good=False, told=f"is gone: {node.why_gone}", remedy=remedy)
    for name, why in checkup.silent:
        remedy = "look at /tmp/ray/session_latest/logs on it, or start its Ray again"
        yield Finding(name=f"node {name}", good=False, told=f"is alive to Ray, but {why}", remedy=remedy)


def _versions(facts: Sequence[NodeFacts], here: Mapping[str, str]) -> Iterator[Finding]:
    for name in EQUAL:
        places: dict[str, list[str]] = {}
        for place, versions in ((HERE, here), *((node.node, node.versions) for node in facts)):
            if name in versions:
                places.setdefault(versions[name], []).append(place)
        if not places:
            continue
        told = "; ".join(f"{version} on {', '.join(where)}" for version, where in places.items())
        equal = len(places) == 1
        remedy = f"install the same {name} on every node: ranks of one trial must not differ"
        yield Finding(name=name, good=equal, told=f"{next(iter(places))} everywhere" if equal else told, remedy=remedy)


def _installed(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    for name in NEEDED:
        if missing := [node.node for node in facts if name not in node.versions]:
            told = f"is not installed for Ray's Python on {', '.join(missing)}"
            yield Finding(name=name, good=False, told=told, remedy=f"run pip install {name} there, then start Ray again")
    if missing := [node.node for node in facts if "autotune" in node.versions and not node.rank_main]:
        told = f"lies elsewhere on {', '.join(missing)}, so that ranks do not start there"
        yield Finding(name="autotune", good=False, told=told, remedy="install it at the same path on every node")


def _gloo(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """gloo listens at the named interface, else at what the host's name resolves to."""
    variable = "GLOO_SOCKET_IFNAME"
    for node in facts:
        own = _interface_at(node, node.address)
        remedy = f"start Ray there with {variable}={own or 'the interface of ' + node.address} in its environment"
        named = node.environment.get(variable)
        if named is not None:
            there = all(name in node.interfaces for name in named.split(","))
            told = f"{variable}={named}" + ("" if there else f" is not among {', '.join(node.interfaces) or 'none'}")
            yield Finding(name=f"gloo's interface on {node.node}", good=there, told=told, remedy=remedy)
        else:
            good = node.resolved == node.address
            found = (
                f"{node.resolved} ({_interface_at(node, node.resolved) or 'no interface of it'})"
                if node.resolved
                else "nothing"
            )
            told = f"the name {node.host} resolves to {found}, and Ray reaches it at {node.address} ({own or '?'})"
            yield Finding(name=f"gloo's interface on {node.node}", good=good, told=told, remedy=remedy)


def _nccl(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    for node in facts:
        named = node.environment.get("NCCL_SOCKET_IFNAME")
        if not node.gpus or named is None:
            continue
        fits = [name for name in node.interfaces if _nccl_takes(named, name)]
        told = f"NCCL_SOCKET_IFNAME={named}: {', '.join(fits) or 'none of ' + ', '.join(node.interfaces)}"
        own = _interface_at(node, node.address)
        remedy = f"set it to {own or 'the interface of ' + node.address}, or leave it out, and start Ray there again"
        yield Finding(name=f"NCCL's interface on {node.node}", good=bool(fits), told=told, remedy=remedy)


def _nccl_takes(named: str, interface: str) -> bool:
    """By NCCL's rule: prefixes with commas between; `^` before them: all but these; `=`: whole names."""
    names = named.lstrip("^=").split(",")
    hit = any(interface == name if "=" in named[:2] else interface.startswith(name) for name in names)
    return hit != named.startswith("^")


def _interface_at(node: NodeFacts, address: str) -> str:
    return next((name for name, at in node.interfaces.items() if at == address), "")


def _ports(unreached: Sequence[Unreached], facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    for item in unreached:
        told = f"a rank's port on {item.listener} cannot be reached from {item.caller}: {item.problem}"
        remedy = "allow all TCP ports between the nodes: ranks listen at ports that the system chooses"
        yield Finding(name="ports", good=False, told=told, remedy=remedy)
    if not unreached and len(facts) > 1:
        yield Finding(name="ports", good=True, told="every node reaches every other")


def _shared_memory(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    for node in facts:
        if node.shared_memory_bytes is None:
            continue
        good = node.shared_memory_bytes >= LEAST_SHARED_BYTES
        remedy = (
            f"allow at least {bytes_text(LEAST_SHARED_BYTES)} (a container's --shm-size; a pod's emptyDir of medium Memory)"
        )
        told = f"{bytes_text(node.shared_memory_bytes)} free in /dev/shm"
        yield Finding(name=f"shared memory on {node.node}", good=good, told=told, remedy=remedy)


def _locked_memory(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """RDMA registers the buffers of collectives, which locks them; sockets need no locked memory."""
    for node in facts:
        limit = "unlimited" if node.locked_memory_bytes is None else bytes_text(node.locked_memory_bytes)
        good = not node.infiniband or node.locked_memory_bytes is None
        told = f"{limit}, {'with' if node.infiniband else 'without'} InfiniBand"
        remedy = "start Ray there after `ulimit -l unlimited`, or with LimitMEMLOCK=infinity in its unit"
        yield Finding(name=f"locked memory on {node.node}", good=good, told=told, remedy=remedy)


def _topology(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    links = {node.node: links_of(node.topology) for node in facts if node.topology}
    for node, found in links.items():
        # Within one switch or bridge GPUs reach each other; over the processors' link they often do not.
        weak = sorted(pair for pair, link in found.items() if link == "SYS")
        strong = any(link.startswith("NV") for link in found.values())
        kinds = ", ".join(f"{link} x {[*found.values()].count(link)}" for link in sorted(set(found.values())))
        good = not (weak and strong)
        pairs = ", ".join(weak[:4]) + (", …" if len(weak) > 4 else "")
        told = f"{kinds}" + ("" if good else f": {pairs} talk through the processors, others by NVLink")
        remedy = "keep tensor_parallel_size within the GPUs that NVLink joins, or choose other GPUs by CUDA_VISIBLE_DEVICES"
        yield Finding(name=f"links of GPUs on {node}", good=good, told=told, remedy=remedy)
    if len({tuple(sorted(found.values())) for found in links.values()}) > 1:
        told = f"are not laid out alike on {', '.join(links)}"
        yield Finding(name="links of GPUs", good=False, told=told, remedy="use nodes that are alike: the slowest sets the pace")


def links_of(topology: Sequence[str]) -> dict[str, str]:
    """GPU pair -> how it is joined (NV4, PIX, PXB, PHB, NODE, SYS), from the lines of `nvidia-smi topo -m`."""
    heading = next((line.split() for line in topology if fnmatch.fnmatch(line.strip(), "*GPU0*GPU1*")), [])
    columns = [name for name in heading if name.startswith("GPU") and name[3:].isdigit()]
    found = {}
    for line in topology:
        first, *cells = line.split() or [""]
        if first in columns:
            others = zip(columns, cells, strict=False)
            found.update({f"{first}-{other}": cell for other, cell in others if columns.index(first) < columns.index(other)})
    return found
