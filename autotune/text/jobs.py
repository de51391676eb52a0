"""Jobs as text: state, place, labels, progress."""

from collections.abc import Mapping
from typing import Any

from storage.log_records import ProgressRecord
from storage.records import JobRecord


def state_text(job: JobRecord) -> str:
    """`succeeded (BUDGET)`."""
    return f"{job.state.value.lower()}{f' ({job.reason})' if job.reason else ''}"


def labels_text(request: Mapping[str, Any]) -> str:
    """`name nightly; tags smoke a100; note …`, as far as the request has them."""
    given = {"name": request.get("name"), "tags": " ".join(request.get("tags") or ()), "note": request.get("note")}
    return "; ".join(f"{field} {text}" for field, text in given.items() if text)


def model_text(job: JobRecord) -> str:
    """The model's name; of a file that a service does not name, its path."""
    return str((job.request.get("resolved_model") or {}).get("name") or job.request.get("model", ""))


def place_text(job: JobRecord) -> str:
    """`llama-tiny on local with 2 ranks`, as far as the request tells."""
    request = job.request
    cluster = request.get("resolved_cluster") or {}
    ranks = cluster.get("nodes", 0) * cluster.get("devices_per_node", 0) or request.get("ranks")
    return f"{model_text(job)} on {cluster.get('name') or request.get('cluster', '')}" + (
        f" with {ranks} ranks" if ranks else ""
    )


def progress_text(sign: ProgressRecord) -> str:
    """`measure 12, 103.5/s`."""
    rate = f", {sign.samples_per_second:.4g}/s" if sign.samples_per_second else ""
    return f"{sign.phase}{f' {sign.step}' if sign.step else ''}{rate}"
