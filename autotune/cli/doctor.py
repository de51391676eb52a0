"""`autotune doctor`: check for problems that would prevent a sweep here, or prevent or distort one on a Ray cluster."""

import fnmatch
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.status import Status, write_document
from autotune.errors import RequestError
from autotune.installed import CLIENT, WHOLE, version
from autotune.ray_cluster import ANY, named_address
from autotune.request.engines import CAPABILITIES, why_unusable
from autotune.text.console import Console
from autotune.text.rows import bytes_text, first_text
from executor.errors import RunnerError
from search_spaces.clusters.microbenchmark import MeasuredRow, Operation
from search_spaces.clusters.presets import local_cluster
from storage.address import default_database_url, without_password
from storage.errors import StorageError
from storage.records import CalibrationRecord
from storage.store import open_store

if TYPE_CHECKING:
    from executor.runners.ray.checkup import Checkup, NodeFacts, Pair, Unreached


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedItem:
    """One checked item."""

    name: str
    good: bool
    """Whether it does not prevent a sweep."""
    text: str
    """The result."""
    remedy: str = ""
    """What to do if it is not good."""

    def document(self) -> dict[str, Any]:
        """As an element of `doctor --json`, by its fields."""
        return {"name": self.name, "good": self.good, "text": self.text, "remedy": self.remedy}


SHARED_MEMORY_BYTES = 1 << 30
"""Minimum free space in /dev/shm, which holds Ray's object store and the buffers of gloo and NCCL."""


def doctor_command(cluster: bool, ray_address: str | None, database: str | None, json: bool) -> Status:
    """Run all checks; `cluster`: of every node of a Ray cluster too. Nothing is changed, except that the database is opened."""
    if ray_address is not None and not cluster:
        raise RequestError("ray_address", "is for a cluster, but only this machine is checked", "add --cluster")
    checks: list[Callable[[], list[CheckedItem]]] = [
        _python, _packages, _engines, _names, _machine, _shared_memory, lambda: _database(database),
    ]  # fmt: skip
    if cluster:
        checks.append(lambda: cluster_findings(ray_address, database))
    findings = [finding for check in checks for finding in check()]
    if json:
        write_document([finding.document() for finding in findings])
    else:
        console = Console()
        for finding in findings:
            mark = "[green]ok  [/green]" if finding.good else "[red]BAD [/red]"
            remedy = "" if finding.good else f"; {finding.remedy}"
            console.print(mark, end="", markup=True)
            console.print(f" {finding.name}: ", end="")
            console.print(f"{finding.text}{remedy}", soft_wrap=True)
    return Status.OK if all(finding.good for finding in findings) else Status.FAILURE


def _python() -> list[CheckedItem]:
    version = ".".join(map(str, sys.version_info[:3]))
    return [CheckedItem(name="python", good=sys.version_info >= (3, 11), text=version, remedy="use Python 3.11 or newer")]


def _packages() -> list[CheckedItem]:
    return [_package(name) for name in ("torch", "ray", "optuna", "sqlalchemy", "alembic", "fastapi")]


def _package(name: str) -> CheckedItem:
    try:
        return CheckedItem(name=name, good=True, text=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return CheckedItem(name=name, good=False, text="is not installed", remedy=f"run pip install {name}")


def _engines() -> list[CheckedItem]:
    """Third-party engines. A missing one only prevents sweeps with this engine."""
    findings = []
    for engine in CAPABILITIES:
        if refusal := why_unusable(engine):
            text = f"{refusal.message}; for sweeps with --engine {engine}, {refusal.remedy}"
            findings.append(CheckedItem(name=f"engine {engine}", good=True, text=text))
    return findings


def _names() -> list[CheckedItem]:
    """Another distribution with one of our top-level package names conflicts with ours in one environment."""
    owners = importlib.metadata.packages_distributions()
    findings = []
    packages = ("api", "autotune", "executor", "search_spaces", "storage")
    for package in packages:
        other_owners = sorted({owner for owner in owners.get(package, []) if owner.lower() not in (WHOLE, CLIENT)})
        if other_owners:
            text = f"the package {package!r} is also installed by {', '.join(other_owners)}"
            findings.append(CheckedItem(name="names", good=False, text=text, remedy="use an environment without it"))
    return findings or [CheckedItem(name="names", good=True, text=f"{', '.join(packages)} belong only to autotune")]


def _machine() -> list[CheckedItem]:
    cluster = local_cluster(1, None)
    text = f"{os.cpu_count()} cores, {bytes_text(cluster.host_memory_bytes)} of memory, nvidia-smi " + (
        "found" if shutil.which("nvidia-smi") else "not found: trials run on the CPU"
    )
    return [CheckedItem(name="machine", good=True, text=text)]


def _shared_memory() -> list[CheckedItem]:
    path = Path("/dev/shm")
    if not path.exists():
        return []
    free = shutil.disk_usage(path).free
    return [
        CheckedItem(
            name="shared memory",
            good=free >= SHARED_MEMORY_BYTES,
            text=f"{bytes_text(free)} free in /dev/shm",
            remedy=f"free or allow at least {bytes_text(SHARED_MEMORY_BYTES)} (in a container: --shm-size)",
        )
    ]


def _database(database: str | None) -> list[CheckedItem]:
    url = database or default_database_url()
    try:
        with open_store(url) as store:
            store.jobs.newest(limit=1)
    except StorageError as error:
        return [CheckedItem(name="database", good=False, text=str(error), remedy="give another with --db")]
    return [CheckedItem(name="database", good=True, text=without_password(url))]


def cluster_findings(ray_address: str | None, database: str | None) -> list[CheckedItem]:
    """Findings on every node and between nodes. A missing cluster is a finding too."""
    # Imported on demand: Ray takes seconds to load.
    from autotune.cli.cluster import cluster_facts, ray_required
    from executor.runners.ray.checkup import check_up

    address = named_address(ray_address) or ANY
    try:
        with ray_required(address):
            checkup = check_up(address)
    except RunnerError as error:
        text, _, remedy = str(error).rpartition("; ")
        return [CheckedItem(name="Ray", good=False, text=text or remedy, remedy=remedy if text else "")]
    living = sum(node.alive for node in checkup.nodes)
    ray_finding = CheckedItem(name="Ray", good=True, text=f"{living} node{'s' * (living != 1)} at {address}")
    nodes = node_findings(checkup, _versions_here())
    calibration: CalibrationRecord | None = None
    # A database that cannot be opened is a separate finding.
    with suppress(StorageError), open_store(database or default_database_url()) as store:
        calibration = cluster_facts(checkup.nodes, store).calibration
    return [ray_finding, *nodes, *pair_findings(checkup, calibration)]


def _versions_here() -> dict[str, str]:
    """Versions in this process, which must be compatible with the ranks' messages."""
    versions = {"python": platform.python_version(), **({"autotune": mine} if (mine := version()) else {})}
    for name in ("ray", "torch"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def node_findings(checkup: "Checkup", local_versions: Mapping[str, str]) -> list[CheckedItem]:
    """All checks without measurements. `local_versions` has the versions of this process: python, ray, torch, autotune."""
    facts = checkup.facts
    return [
        *_silent(checkup),
        *_versions(facts, local_versions),
        *_installed(facts),
        *(_gloo(facts) if len(facts) > 1 else ()),
        *_nccl(facts),
        *_ports(checkup.unreached, facts),
        *_shared_memory_of_nodes(facts),
        *_locked_memory(facts),
        *_topology(facts),
    ]


def _silent(checkup: "Checkup") -> Iterator[CheckedItem]:
    for node in (node for node in checkup.nodes if not node.alive):
        remedy = "start Ray on it again; a supervisor does, see docs/deploy.md"
        yield CheckedItem(name=f"node {node.name}", good=False, text=f"is gone: {node.why_gone}", remedy=remedy)
    for name, why in checkup.silent:
        remedy = "look at /tmp/ray/session_latest/logs on it, or start its Ray again"
        yield CheckedItem(name=f"node {name}", good=False, text=f"is alive to Ray, but {why}", remedy=remedy)


def _versions(facts: Sequence["NodeFacts"], local_versions: Mapping[str, str]) -> Iterator[CheckedItem]:
    for name in ("python", "ray", "torch", "NCCL", "driver", "autotune"):
        nodes_of: dict[str, list[str]] = {}
        for node_name, versions in (("here", local_versions), *((node.node, node.versions) for node in facts)):
            if name in versions:
                nodes_of.setdefault(versions[name], []).append(node_name)
        if not nodes_of:
            continue
        text = "; ".join(f"{version} on {', '.join(node_names)}" for version, node_names in nodes_of.items())
        equal = len(nodes_of) == 1
        remedy = f"install the same {name} on every node: ranks of one trial must not differ"
        yield CheckedItem(name=name, good=equal, text=f"{next(iter(nodes_of))} everywhere" if equal else text, remedy=remedy)


def _installed(facts: Sequence["NodeFacts"]) -> Iterator[CheckedItem]:
    for name in ("torch", "autotune"):
        if missing := [node.node for node in facts if name not in node.versions]:
            text = f"is not installed for Ray's Python on {', '.join(missing)}"
            yield CheckedItem(name=name, good=False, text=text, remedy=f"run pip install {name} there, then start Ray again")
    if missing := [node.node for node in facts if "autotune" in node.versions and not node.rank_main]:
        text = f"is installed at another path on {', '.join(missing)}, so ranks do not start there"
        yield CheckedItem(name="autotune", good=False, text=text, remedy="install it at the same path on every node")


def _gloo(facts: Sequence["NodeFacts"]) -> Iterator[CheckedItem]:
    """gloo uses the interface in the variable, else the address to which the host name resolves."""
    variable = "GLOO_SOCKET_IFNAME"
    for node in facts:
        interface = _interface_at(node, node.address)
        remedy = f"start Ray there with {variable}={interface or 'the interface of ' + node.address} in its environment"
        configured = node.environment.get(variable)
        if configured is not None:
            exists = all(name in node.interfaces for name in configured.split(","))
            text = f"{variable}={configured}" + ("" if exists else f" is not among {', '.join(node.interfaces) or 'none'}")
            yield CheckedItem(name=f"gloo's interface on {node.node}", good=exists, text=text, remedy=remedy)
        else:
            good = node.resolved == node.address
            resolution = (
                f"{node.resolved} ({_interface_at(node, node.resolved) or 'no interface of it'})"
                if node.resolved
                else "nothing"
            )
            text = f"the name {node.host} resolves to {resolution}, and Ray reaches it at {node.address} ({interface or '?'})"
            yield CheckedItem(name=f"gloo's interface on {node.node}", good=good, text=text, remedy=remedy)


def _nccl(facts: Sequence["NodeFacts"]) -> Iterator[CheckedItem]:
    for node in facts:
        configured = node.environment.get("NCCL_SOCKET_IFNAME")
        if not node.gpus or configured is None:
            continue
        fits = [name for name in node.interfaces if _nccl_uses(configured, name)]
        text = f"NCCL_SOCKET_IFNAME={configured}: {', '.join(fits) or 'none of ' + ', '.join(node.interfaces)}"
        interface = _interface_at(node, node.address)
        remedy = f"set it to {interface or 'the interface of ' + node.address}, or leave it out, and start Ray there again"
        yield CheckedItem(name=f"NCCL's interface on {node.node}", good=bool(fits), text=text, remedy=remedy)


def _nccl_uses(setting: str, interface: str) -> bool:
    """NCCL's rule: comma-separated prefixes; `^` first: all except these; `=`: exact names."""
    names = setting.lstrip("^=").split(",")
    hit = any(interface == name if "=" in setting[:2] else interface.startswith(name) for name in names)
    return hit != setting.startswith("^")


def _interface_at(node: "NodeFacts", address: str) -> str:
    return next((name for name, at in node.interfaces.items() if at == address), "")


def _ports(unreached: Sequence["Unreached"], facts: Sequence["NodeFacts"]) -> Iterator[CheckedItem]:
    for item in unreached:
        text = f"a rank's port on {item.listener} cannot be reached from {item.caller}: {item.problem}"
        remedy = "allow all TCP ports between the nodes: ranks listen at ports that the system chooses"
        yield CheckedItem(name="ports", good=False, text=text, remedy=remedy)
    if not unreached and len(facts) > 1:
        yield CheckedItem(name="ports", good=True, text="every node reaches every other")


def _shared_memory_of_nodes(facts: Sequence["NodeFacts"]) -> Iterator[CheckedItem]:
    for node in facts:
        if node.shared_memory_bytes is None:
            continue
        good = node.shared_memory_bytes >= SHARED_MEMORY_BYTES
        remedy = (
            f"allow at least {bytes_text(SHARED_MEMORY_BYTES)} (a container's --shm-size; a pod's emptyDir of medium Memory)"
        )
        text = f"{bytes_text(node.shared_memory_bytes)} free in /dev/shm"
        yield CheckedItem(name=f"shared memory on {node.node}", good=good, text=text, remedy=remedy)


def _locked_memory(facts: Sequence["NodeFacts"]) -> Iterator[CheckedItem]:
    """RDMA registers the buffers of collectives, which locks them; sockets need no locked memory."""
    for node in facts:
        limit = "unlimited" if node.locked_memory_bytes is None else bytes_text(node.locked_memory_bytes)
        good = not node.infiniband or node.locked_memory_bytes is None
        text = f"{limit}, {'with' if node.infiniband else 'without'} InfiniBand"
        remedy = "start Ray there after `ulimit -l unlimited`, or with LimitMEMLOCK=infinity in its unit"
        yield CheckedItem(name=f"locked memory on {node.node}", good=good, text=text, remedy=remedy)


def _topology(facts: Sequence["NodeFacts"]) -> Iterator[CheckedItem]:
    links = {node.node: links_of(node.topology) for node in facts if node.topology}
    for node, pair_links in links.items():
        # Within one switch or bridge GPUs have peer access; over the link between the processors often not.
        weak = sorted(pair for pair, link in pair_links.items() if link == "SYS")
        strong = any(link.startswith("NV") for link in pair_links.values())
        kinds = ", ".join(f"{link} x {[*pair_links.values()].count(link)}" for link in sorted(set(pair_links.values())))
        good = not (weak and strong)
        pairs = first_text(weak, 4)
        text = f"{kinds}" + ("" if good else f": {pairs} communicate through the processors, others by NVLink")
        remedy = "keep tensor_parallel_size within the GPUs that NVLink connects, or choose other GPUs by CUDA_VISIBLE_DEVICES"
        yield CheckedItem(name=f"links of GPUs on {node}", good=good, text=text, remedy=remedy)
    if len({tuple(sorted(pair_links.values())) for pair_links in links.values()}) > 1:
        text = f"have different topologies on {', '.join(links)}"
        yield CheckedItem(name="links of GPUs", good=False, text=text, remedy="use identical nodes: the slowest sets the pace")


def links_of(topology: Sequence[str]) -> dict[str, str]:
    """GPU pair -> connection type (NV4, PIX, PXB, PHB, NODE, SYS), from the lines of `nvidia-smi topo -m`."""
    heading = next((line.split() for line in topology if fnmatch.fnmatch(line.strip(), "*GPU0*GPU1*")), [])
    columns = [name for name in heading if name.startswith("GPU") and name[3:].isdigit()]
    link_of_pair = {}
    for line in topology:
        first, *cells = line.split() or [""]
        if first in columns:
            peers = zip(columns, cells, strict=False)
            link_of_pair.update(
                {f"{first}-{other}": cell for other, cell in peers if columns.index(first) < columns.index(other)}
            )
    return link_of_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAllReduce:
    """Expected duration of an all-reduce over a pair."""

    small_seconds: float
    large_seconds: float
    source: str
    """Description of the source."""


def pair_findings(checkup: "Checkup", calibration: CalibrationRecord | None) -> list[CheckedItem]:
    """One finding per pair; none with a single node."""
    measured = [pair for pair in checkup.pairs if not pair.problem]
    expected = expected_by(calibration.rows, calibration.id) if calibration is not None else None
    # A median of fewer pairs is no expectation.
    if expected is None and len(measured) >= 3:
        expected = _middle(measured)
    return [_finding(pair, expected, checkup.backend) for pair in checkup.pairs]


def expected_by(rows: Sequence[MeasuredRow], calibration: str) -> ExpectedAllReduce | None:
    """The expectation for a pair from a calibration's all-reduces across nodes; None: it has none.

    The time of the smallest message is latency, which grows with the number of ranks and so is an upper bound. For larger
    messages the best bandwidth counts; a pair's volume is the message itself.
    """
    from autotune.prediction.fitting.calibration import link_volume
    from executor.runners.ray.checkup import LARGE_BYTES

    across = [row for row in rows if row.operation is Operation.ALL_REDUCE and row.group.in_node == 1 and row.group.ranks > 1]
    if not across:
        return None
    smallest = min(across, key=lambda row: row.shape[0])
    bandwidth = max(link_volume(row) * row.group.sharing / row.seconds for row in across)
    large = LARGE_BYTES / bandwidth
    return ExpectedAllReduce(small_seconds=smallest.seconds, large_seconds=large, source=f"calibration {calibration}")


def _middle(pairs: Sequence["Pair"]) -> ExpectedAllReduce:
    return ExpectedAllReduce(
        small_seconds=statistics.median(pair.small_seconds for pair in pairs),
        large_seconds=statistics.median(pair.large_seconds for pair in pairs),
        source="the median of all pairs",
    )


def _finding(pair: "Pair", expected: ExpectedAllReduce | None, backend: str) -> CheckedItem:
    from executor.runners.ray.checkup import LARGE_BYTES

    name = f"all-reduce {pair.nodes[0]} - {pair.nodes[1]}"
    if pair.problem:
        remedy = "repair interface and ports first, and free a device on each node; then check the ranks' logs"
        return CheckedItem(name=name, good=False, text=f"{backend} fails: {pair.problem}", remedy=remedy)
    rate = LARGE_BYTES / pair.large_seconds / 1e9
    text = f"{pair.small_seconds * 1e6:.0f} us for 4 KiB, {rate:.3g} GB/s for 16 MiB ({backend})"
    slow = list(_slower(pair, expected)) if expected is not None else []
    against = f", {' and '.join(slow)} of {expected.source}" if slow and expected is not None else ""
    remedy = "check link speed, cable and switch port (`ethtool`) of the node that is in every slow pair"
    return CheckedItem(name=name, good=not slow, text=text + against, remedy=remedy)


def _slower(pair: "Pair", expected: ExpectedAllReduce) -> Iterator[str]:
    # Slowdown above which a fault is assumed; smaller ones cannot be distinguished from other traffic.
    slower = 2.0
    if pair.small_seconds > slower * expected.small_seconds:
        yield f"{pair.small_seconds / expected.small_seconds:.1f} times the latency"
    if pair.large_seconds > slower * expected.large_seconds:
        yield f"{expected.large_seconds / pair.large_seconds:.0%} of the bandwidth"
