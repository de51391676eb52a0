"""Facts about a Ray cluster: reported by Ray, stated in its description, measured by a calibration."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.prediction.cases.bench_cases import link_volume
from autotune.prediction.planning.calibrated import fingerprint
from executor.errors import RunnerError
from executor.runners.ray.describe import RayNode, cluster_of
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MeasuredRow, Operation, network_sharing, ranks_in_domain
from storage.records import CalibrationRecord, QuarantineRecord
from storage.store import Store


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
