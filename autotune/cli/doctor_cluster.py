"""`autotune doctor --cluster`: check for problems that would prevent or distort a sweep on a Ray cluster."""

import importlib.metadata
import platform
from contextlib import suppress

from autotune.cli.cluster import ray_required
from autotune.cli.doctor_nodes import node_findings
from autotune.cli.doctor_pairs import pair_findings
from autotune.cli.finding import Finding
from autotune.cluster.facts import cluster_facts
from autotune.cluster.ray_cluster import ANY, named_address
from executor.errors import RunnerError
from executor.runners.ray.checkup import Checkup, check_up
from storage.address import default_database_url
from storage.errors import StorageError
from storage.records import CalibrationRecord
from storage.store import open_store


def cluster_findings(ray_address: str | None, database: str | None) -> list[Finding]:
    """Findings on every node and between nodes. A missing cluster is a finding too."""
    address = named_address(ray_address) or ANY
    try:
        with ray_required(address):
            checkup = check_up(address)
    except RunnerError as error:
        text, _, remedy = str(error).rpartition("; ")
        return [Finding(name="Ray", good=False, text=text or remedy, remedy=remedy if text else "")]
    living = sum(node.alive for node in checkup.nodes)
    found = Finding(name="Ray", good=True, text=f"{living} node{'s' * (living != 1)} at {address}")
    nodes, pairs = node_findings(checkup, _versions_here()), pair_findings(checkup, _calibration(checkup, database))
    return [found, *nodes, *pairs]


def _versions_here() -> dict[str, str]:
    """Versions in this process, which must be compatible with the ranks' messages."""
    found = {"python": platform.python_version()}
    for name in ("ray", "torch", "autotune"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _calibration(checkup: Checkup, database: str | None) -> CalibrationRecord | None:
    """The calibration of this cluster. A database that cannot be opened is a separate finding."""
    with suppress(StorageError), open_store(database or default_database_url()) as store:
        return cluster_facts(checkup.nodes, store).calibration
    return None
