"""The provenance of a result: versions, hardware, history, the user's commit."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autotune.objective.ranking import peak_bytes, rate
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import Verdict
from autotune.session.session import Session
from search_spaces.trial_config import stable_hash

PACKAGES = ("autotune", "torch", "numpy", "optuna", "ray", "sqlalchemy")


def provenance(session: Session, snapshot: JobSnapshot, verdict: Verdict) -> dict[str, Any]:
    """Return the data needed to interpret a result later. `environment` holds what the ranks themselves recorded."""
    result = verdict.best.result
    device = session.cluster.device
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "environment": dict(sorted(result.environment.items())) if result else {},
        "hardware": {"device": device.name, "kind": device.kind, "memory_bytes": device.memory_bytes},
        "topology": {
            "nodes": session.cluster.nodes,
            "devices_per_node": session.cluster.devices_per_node,
            "world_size": session.world_size,
            "hosts": sorted({rank.host for rank in result.ranks}) if result else [],
        },
        "seed": session.request.seed,
        "history_hash": history_hash(snapshot),
        "git_commit": git_commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def history_hash(snapshot: JobSnapshot) -> str:
    """Hash all trials (configurations, their order, their outcomes) to 16 hexadecimal digits."""
    rows = [
        [t.number, t.config_hash, t.purpose.value, t.repeat, t.outcome.value if t.outcome else None, rate(t), peak_bytes(t)]
        for t in snapshot.trials
    ]
    return stable_hash(rows)


def git_commit() -> str | None:
    """The commit of the current directory; None if it is not a git repository or git is not installed."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
