"""Jobs as text: state, place, labels, progress."""

from collections.abc import Mapping
from typing import Any

from search_spaces.outcome import StopReason
from search_spaces.quantities import number_text
from search_spaces.shared_records import AttemptProgress
from storage.records import JobRecord


def state_text(job: JobRecord) -> str:
    """`succeeded (BUDGET)`."""
    return f"{state_word(job.state, job.reason)}{f' ({job.reason})' if job.reason else ''}"


def state_word(state: str, reason: str) -> str:
    """The state in lower case; a job that ended without a configuration that fits is not called succeeded."""
    return "nothing fits" if reason == StopReason.NOTHING_FEASIBLE else state.lower()


def labels_text(request: Mapping[str, Any]) -> str:
    """`name nightly; tags smoke a100; note …`, only the fields that the request has."""
    labels = {"name": request.get("name"), "tags": " ".join(request.get("tags") or ()), "note": request.get("note")}
    return "; ".join(f"{field} {text}" for field, text in labels.items() if text)


def model_text(job: JobRecord) -> str:
    """The model's name; for a file without a name in the request, its path."""
    return str((job.request.get("resolved_model") or {}).get("name") or job.request.get("model", ""))


def place_text(job: JobRecord) -> str:
    """`llama-tiny on local with 2 ranks`, only the parts that the request states."""
    request = job.request
    cluster = request.get("resolved_cluster") or {}
    ranks = cluster.get("nodes", 0) * cluster.get("devices_per_node", 0) or request.get("ranks")
    return f"{model_text(job)} on {cluster.get('name') or request.get('cluster', '')}" + (
        f" with {ranks} ranks" if ranks else ""
    )


def progress_text(record: AttemptProgress) -> str:
    """`measure 12, 103.5/s`."""
    rate = f", {number_text(record.samples_per_second)}/s" if record.samples_per_second else ""
    return f"{record.phase}{f' {record.step}' if record.step else ''}{rate}"
