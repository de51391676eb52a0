"""`autotune doctor`: check for problems that would prevent a sweep here, with remedies."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.cli.documents import write_document
from autotune.cli.finding import CheckedItem
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.installed import CLIENT, WHOLE
from autotune.request.engines import CAPABILITIES, why_unusable
from autotune.text.console import Console
from autotune.text.sizes import bytes_text
from search_spaces.clusters.presets import local_cluster
from storage.address import default_database_url, without_password
from storage.errors import StorageError
from storage.store import open_store

PACKAGES = ("api", "autotune", "executor", "search_spaces", "storage")
NEEDED = ("torch", "ray", "optuna", "sqlalchemy", "alembic", "fastapi")
SHARED_MEMORY_BYTES = 1 << 30
"""Minimum free space in /dev/shm, which holds Ray's object store and gloo's buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Parsed options of the command."""

    cluster: bool
    """Whether every node of a Ray cluster is checked too."""
    ray_address: str | None
    database: str | None
    json: bool


def doctor_command(options: DoctorOptions) -> Status:
    """Run all checks. Nothing is changed, except that the database is opened."""
    if options.ray_address is not None and not options.cluster:
        raise RequestError("ray_address", "is for a cluster, but only this machine is checked", "add --cluster")
    checks: list[Callable[[], list[CheckedItem]]] = [
        _python, _packages, _engines, _names, _machine, _shared_memory, lambda: _database(options.database),
    ]  # fmt: skip
    if options.cluster:
        checks.append(lambda: _cluster(options))
    findings = [finding for check in checks for finding in check()]
    if options.json:
        write_document([finding.document() for finding in findings])
    else:
        console = Console()
        for finding in findings:
            mark = "[green]ok  [/green]" if finding.good else "[red]BAD [/red]"
            remedy = "" if finding.good else f"; {finding.remedy}"
            console.print(mark, end="", markup=True)
            console.print(f" {finding.name}: ", end="")
            console.print(f"{finding.text}{remedy}", markup=False, highlight=False, soft_wrap=True)
    return Status.OK if all(finding.good for finding in findings) else Status.FAILURE


def _python() -> list[CheckedItem]:
    version = ".".join(map(str, sys.version_info[:3]))
    return [CheckedItem(name="python", good=sys.version_info >= (3, 11), text=version, remedy="use Python 3.11 or newer")]


def _packages() -> list[CheckedItem]:
    return [_package(name) for name in NEEDED]


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
    for package in PACKAGES:
        other_owners = sorted({owner for owner in owners.get(package, []) if owner.lower() not in (WHOLE, CLIENT)})
        if other_owners:
            text = f"the package {package!r} is also installed by {', '.join(other_owners)}"
            findings.append(CheckedItem(name="names", good=False, text=text, remedy="use an environment without it"))
    return findings or [CheckedItem(name="names", good=True, text=f"{', '.join(PACKAGES)} belong only to autotune")]


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


def _cluster(options: DoctorOptions) -> list[CheckedItem]:
    # Imported on demand: Ray takes seconds to load.
    from autotune.cli.doctor_cluster import cluster_findings

    return cluster_findings(options.ray_address, options.database)


def _database(database: str | None) -> list[CheckedItem]:
    url = database or default_database_url()
    try:
        with open_store(url) as store:
            store.jobs.newest(limit=1)
    except StorageError as error:
        return [CheckedItem(name="database", good=False, text=str(error), remedy="give another with --db")]
    return [CheckedItem(name="database", good=True, text=without_password(url))]
