"""`autotune cluster`: show a Ray cluster from Ray, its description, a calibration and the quarantine."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from autotune.cli.documents import write_document
from autotune.cli.status import Status
from autotune.cluster.facts import Claim, ClusterFacts, cluster_facts
from autotune.cluster.ray_cluster import ANY, named_address
from autotune.errors import RequestError
from autotune.text.console import Console
from autotune.text.sizes import bytes_text
from executor.errors import RunnerError
from executor.runners.ray.describe import RayNode, ray_nodes
from search_spaces.plain import to_plain
from storage.address import default_database_url
from storage.records import QuarantineRecord
from storage.store import open_store


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
    Console(stderr=True).print(f"{node} is released", highlight=False, markup=False)
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
    _print_line(console, f"Ray at {address}: {living} node{'s' * (living != 1)}" + (f", {gone} gone" if gone else ""))
    console.print(_nodes_table(facts), highlight=False)
    for node in facts.nodes:
        if not node.alive:
            _print_line(console, f"{node.name} is gone: {node.why_gone}; start Ray on it again, as docs/deploy.md says")
    for item in facts.quarantine:
        _print_line(console, _quarantine_text(item, facts.nodes))
    _print_line(console, "")
    for line in _figures(facts):
        _print_line(console, line)


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


def _print_line(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
