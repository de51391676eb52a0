"""`autotune cluster`: facts about a Ray cluster, from Ray, its description, a calibration and the quarantine."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from autotune.cli.status import Status, write_document
from autotune.errors import RequestError
from autotune.prediction.fitting.calibration import link_volume
from autotune.prediction.planning.calibrated import fingerprint
from autotune.ray_cluster import ANY, named_address
from autotune.text.console import Console
from autotune.text.rows import bytes_text
from executor.errors import RunnerError
from executor.runners.ray.nodes import RayNode, cluster_of, ray_nodes
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MeasuredRow, Operation, network_sharing, ranks_in_domain
from search_spaces.plain import to_plain
from storage.address import default_database_url
from storage.records import CalibrationRecord, QuarantineRecord
from storage.store import Store, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A figure of the cluster's description, and the value that its ranks reached."""

    what: str
    unit: str
    """FLOP/s or bytes/s."""
    stated: float | None
    """None: the description does not state it."""
    measured: float

    @property
    def share(self) -> float | None:
        """Measured value divided by the stated one."""
        return self.measured / self.stated if self.stated else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """All facts about a Ray cluster."""

    nodes: tuple[RayNode, ...]
    """Alive ones first."""
    cluster: ClusterSpec | None
    """The cluster that sweeps with `--cluster ray` run on; None: it cannot be described."""
    problem: str
    """Why it cannot be described; empty: it can."""
    calibration: CalibrationRecord | None
    """The newest calibration of exactly this hardware."""
    claims: tuple[Claim, ...]
    """Empty without a calibration."""
    unmeasured: tuple[str, ...]
    """Live hosts that were not part of the calibration."""
    quarantine: tuple[QuarantineRecord, ...]
    """Nodes in quarantine, which get no trials, whether or not they are here."""


def cluster_facts(nodes: Sequence[RayNode], store: Store) -> ClusterFacts:
    """Combine Ray's report of its nodes with the database's calibrations of such hardware."""
    cluster, problem = _described([node for node in nodes if node.alive])
    calibrations = store.calibrations.newest(fingerprint(cluster), limit=1) if cluster is not None else []
    record = calibrations[0] if calibrations else None
    alive_hosts = sorted({node.host for node in nodes if node.alive})
    return ClusterFacts(
        nodes=tuple(nodes),
        cluster=cluster,
        problem=problem,
        calibration=record,
        claims=tuple(_claims(cluster, record.rows)) if cluster is not None and record is not None else (),
        unmeasured=tuple(host for host in alive_hosts if host not in record.hosts) if record is not None else (),
        quarantine=tuple(store.nodes.quarantined()),
    )


def _described(living: Sequence[RayNode]) -> tuple[ClusterSpec | None, str]:
    try:
        return cluster_of([node.resources for node in living]), ""
    except RunnerError as error:
        return None, str(error)


def _claims(cluster: ClusterSpec, rows: Sequence[MeasuredRow]) -> Iterator[Claim]:
    """The best measured value for each figure of the description."""
    products = [row for row in rows if row.operation is Operation.PRODUCT]
    for precision in dict.fromkeys(row.precision for row in products):
        speeds = [_flops(row) for row in products if row.precision == precision]
        nominal = cluster.device.peak_flops.get(precision)
        yield Claim(what=f"{precision} products of a device", unit="FLOP/s", stated=nominal, measured=max(speeds))
    copies = [8 * row.shape[0] / row.seconds for row in rows if row.operation is Operation.COPY]
    if copies:
        nominal = cluster.device.memory_bandwidth
        yield Claim(what="memory of a device", unit="bytes/s", stated=nominal, measured=max(copies))
    collectives = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER)
    grouped = [row for row in rows if row.operation in collectives and row.group.ranks > 1]
    inside = [link_volume(row) / row.seconds for row in grouped if row.group.ranks == ranks_in_domain(row.group, cluster)]
    if inside:
        links, nominal = f"links in a {cluster.link_domain_text}", cluster.intra_node_bandwidth
        yield Claim(what=links, unit="bytes/s", stated=nominal, measured=max(inside))
    # Groups that share a node's network each send their own volume over it at the same time.
    crossing = [row for row in grouped if row.group.ranks > ranks_in_domain(row.group, cluster)]
    across = [link_volume(row) * network_sharing(row.group, cluster) / row.seconds for row in crossing]
    if across:
        yield Claim(what="network of a node", unit="bytes/s", stated=cluster.inter_node_bandwidth, measured=max(across))


def _flops(row: MeasuredRow) -> float:
    return 2.0 * row.shape[0] * row.shape[1] * row.shape[2] / row.seconds


def cluster_command(ray_address: str | None, database: str | None, as_json: bool) -> Status:
    """Print the cluster without changing anything."""
    address = named_address(ray_address) or ANY
    with ray_required(address):
        nodes = ray_nodes(address)
    with open_store(database or default_database_url()) as store:
        facts = cluster_facts(nodes, store)
    if as_json:
        write_document(_document(address, facts), default=str)
    else:
        _print(address, facts, Console())
    return Status.OK


def release_command(node: str, database: str | None) -> Status:
    """Allow trials on the node again."""
    with open_store(database or default_database_url()) as store:
        if not store.nodes.release(node):
            quarantined = ", ".join(item.node for item in store.nodes.quarantined())
            problem = f"{node!r} is not in quarantine"
            raise RequestError(
                "release", problem, f"give one of {quarantined}" if quarantined else "no node is; `autotune cluster` shows them"
            )
    Console(stderr=True).print(f"{node} is released")
    return Status.OK


@contextlib.contextmanager
def ray_required(address: str) -> Iterator[None]:
    """Context that turns "no Ray found" without a named address into an error with instructions."""
    try:
        yield
    except RunnerError as error:
        if address != ANY:
            raise
        remedy = "start one with `ray start --head`, or name another's with --ray-address HOST:PORT"
        raise RunnerError(f"no Ray cluster runs on this machine; {remedy}") from error


def _document(address: str, facts: ClusterFacts) -> dict[str, Any]:
    record = facts.calibration
    return {
        "address": address,
        "nodes": [to_plain(node) for node in facts.nodes],
        "cluster": None if facts.cluster is None else to_plain(facts.cluster),
        "problem": facts.problem or None,
        "calibration": None
        if record is None
        else {
            "id": record.id,
            "created": record.created.isoformat(),
            "hosts": list(record.hosts),
            "not_measured": list(facts.unmeasured),
            "claims": [to_plain(claim) for claim in facts.claims],
        },
        "quarantine": [to_plain(item) for item in facts.quarantine],
    }


def _print(address: str, facts: ClusterFacts, console: Console) -> None:
    living = sum(node.alive for node in facts.nodes)
    gone = len(facts.nodes) - living
    console.print(f"Ray at {address}: {living} node{'s' * (living != 1)}" + (f", {gone} gone" if gone else ""), soft_wrap=True)
    console.print(_nodes_table(facts))
    for node in facts.nodes:
        if not node.alive:
            console.print(
                f"{node.name} is gone: {node.why_gone}; start Ray on it again, as docs/deploy.md says", soft_wrap=True
            )
    for item in facts.quarantine:
        console.print(_quarantine_text(item, facts.nodes), soft_wrap=True)
    console.print("", soft_wrap=True)
    for line in _figures(facts):
        console.print(line, soft_wrap=True)


def _nodes_table(facts: ClusterFacts) -> Table:
    kept_out = {item.node for item in facts.quarantine}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("node", "host", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("GPUs", "CPUs", "memory"):
        table.add_column(name, no_wrap=True, justify="right")
    for node in facts.nodes:
        state = "gone" if not node.alive else "quarantine" if node.name in kept_out else "alive"
        gpus = f"{node.resources.get('GPU', 0):g} {node.accelerator}".strip()
        cpus, memory = (f"{node.resources.get('CPU', 0):g}", bytes_text(node.resources.get("memory")))
        table.add_row(node.name, node.host, state, *((gpus, cpus, memory) if node.alive else ("-", "-", "-")))
    return table


def _quarantine_text(item: QuarantineRecord, nodes: tuple[RayNode, ...]) -> str:
    absence = "" if any(node.name == item.node and node.alive for node in nodes) else " (not here now)"
    times = f"{item.since:%Y-%m-%d %H:%M} to {item.until:%Y-%m-%d %H:%M} UTC"
    again = f"`autotune cluster --release {item.node}` lets trials run there before"
    return f"{item.node}{absence} is in quarantine from {times}: {item.reason}; {again}"


def _figures(facts: ClusterFacts) -> list[str]:
    cluster, record = facts.cluster, facts.calibration
    if cluster is None:
        return [facts.problem]
    devices = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"
    lines = [f"sweeps with --cluster ray run on {devices}, {bytes_text(cluster.device.memory_bytes)} each"]
    if record is None:
        links = f"{_rate(cluster.intra_node_bandwidth)} in a node, {_rate(cluster.inter_node_bandwidth)} between nodes"
        return [*lines, f"links, estimated: {links}; measure them with `autotune calibrate --cluster ray`"]
    lines.append(f"calibration {record.id} of {record.created:%Y-%m-%d %H:%M} UTC, stated and measured:")
    lines += [f"  {_claim_text(claim)}" for claim in facts.claims]
    if facts.unmeasured:
        hosts = ", ".join(facts.unmeasured)
        lines.append(f"it was not measured on {hosts}; `autotune calibrate --cluster ray --force` measures all nodes")
    return lines


def _claim_text(claim: Claim) -> str:
    per_second = "TFLOP/s" if claim.unit == "FLOP/s" else "GB/s"
    scale = 1e12 if claim.unit == "FLOP/s" else 1e9
    stated_text = "not stated" if claim.stated is None else f"{claim.stated / scale:.3g}"
    share = "" if claim.share is None else f" ({claim.share:.0%})"
    return f"{claim.what}: {stated_text}, {claim.measured / scale:.3g} {per_second}{share}"


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s"
