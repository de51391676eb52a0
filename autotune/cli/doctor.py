"""`autotune doctor`: what would stop a sweep here, each with its remedy."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.cli.finding import Finding
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.request.engines import CAPABILITIES, why_unusable
from autotune.text.console import Console
from autotune.text.sizes import bytes_text
from search_spaces.clusters.presets import local_cluster
from storage.errors import StorageError
from storage.sql import default_database_url, open_store

ROOMS = ("api", "autotune", "executor", "search_spaces", "storage")
NEEDED = ("torch", "ray", "optuna", "sqlalchemy", "alembic", "fastapi")
SHARED_MEMORY_BYTES = 1 << 30
"""Ray's object store and gloo's buffers live in /dev/shm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What the command line gave."""

    cluster: bool
    """Whether every node of a Ray cluster is looked at, too."""
    ray_address: str | None
    database: str | None
    json: bool


def doctor_command(options: DoctorOptions) -> Status:
    """Look at everything; nothing is changed but that the database is opened."""
    if options.ray_address is not None and not options.cluster:
        raise RequestError("ray_address", "is of a cluster, and this machine alone was asked for", "add --cluster")
    checks: list[Callable[[], list[Finding]]] = [
        _python, _packages, _engines, _names, _machine, _shared_memory, lambda: _database(options.database),
    ]  # fmt: skip
    if options.cluster:
        checks.append(lambda: _cluster(options))
    findings = [finding for check in checks for finding in check()]
    if options.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        console = Console()
        for finding in findings:
            mark = "[green]ok  [/green]" if finding.good else "[red]BAD [/red]"
            remedy = "" if finding.good else f"; {finding.remedy}"
            console.print(mark, end="", markup=True)
            console.print(f" {finding.name}: ", end="")
            console.print(f"{finding.told}{remedy}", markup=False, highlight=False, soft_wrap=True)
    return Status.OK if all(finding.good for finding in findings) else Status.FAILURE


def _python() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    return [Finding(name="python", good=sys.version_info >= (3, 11), told=version, remedy="use Python 3.11 or newer")]


def _packages() -> list[Finding]:
    return [_package(name) for name in NEEDED]


def _package(name: str) -> Finding:
    try:
        return Finding(name=name, good=True, told=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, good=False, told="is not installed", remedy=f"run pip install {name}")


def _engines() -> list[Finding]:
    """Engines of others. One that is not installed stops no sweep but its own."""
    found = []
    for engine in CAPABILITIES:
        if refusal := why_unusable(engine):
            told = f"{refusal.message}; for sweeps with --engine {engine}, {refusal.remedy}"
            found.append(Finding(name=f"engine {engine}", good=True, told=told))
    return found


def _names() -> list[Finding]:
    """Another distribution that owns one of our top-level names breaks us, or we it, in one environment."""
    owners = importlib.metadata.packages_distributions()
    found = []
    for room in ROOMS:
        others = sorted({owner for owner in owners.get(room, []) if owner.lower() != "autotune"})
        if others:
            told = f"the package {room!r} is also installed by {', '.join(others)}"
            found.append(Finding(name="names", good=False, told=told, remedy="use an environment without it"))
    return found or [Finding(name="names", good=True, told=f"{', '.join(ROOMS)} belong to autotune alone")]


def _machine() -> list[Finding]:
    cluster = local_cluster(1, None)
    told = f"{os.cpu_count()} cores, {bytes_text(cluster.host_memory_bytes)} of memory, nvidia-smi " + (
        "found" if shutil.which("nvidia-smi") else "not found: trials run on the CPU"
    )
    return [Finding(name="machine", good=True, told=told)]


def _shared_memory() -> list[Finding]:
    path = Path("/dev/shm")
    if not path.exists():
        return []
    free = shutil.disk_usage(path).free
    return [
        Finding(
            name="shared memory",
            good=free >= SHARED_MEMORY_BYTES,
            told=f"{bytes_text(free)} free in /dev/shm",
            remedy=f"free or allow at least {bytes_text(SHARED_MEMORY_BYTES)} (in a container: --shm-size)",
        )
    ]


def _cluster(options: DoctorOptions) -> list[Finding]:
    # Imported where it is asked for: Ray takes seconds to load.
    from autotune.cli.doctor_cluster import cluster_findings

    return cluster_findings(options.ray_address, options.database)


def _database(database: str | None) -> list[Finding]:
    url = database or default_database_url()
    try:
        with open_store(url) as store:
            store.jobs(limit=1)
    except StorageError as error:
        return [Finding(name="database", good=False, told=str(error), remedy="give another with --db")]
    return [Finding(name="database", good=True, told=url)]
