"""Contradictions within a row."""

from collections.abc import Mapping
from typing import Any

from autotune.evaluation.row_notes import noted_precision, noted_recompute
from autotune.evaluation.validation.row import RowOutcome, noted_accumulation


def device_contradiction(values: Mapping[str, Any]) -> str | None:
    """Why tp x pp x dp x cp is not the device count; a missing cp is 1, a missing dp is whatever remains."""
    devices, tp, pp, dp = (values.get(name) for name in ("num_gpus", "tp", "pp", "dp"))
    cp = values.get("cp", 1)
    if not (devices and tp and pp):
        return None
    sizes = f"tp {tp} x pp {pp} x dp {dp or '?'} x cp {cp}"
    if dp and tp * pp * dp * cp != devices:
        return f"{sizes} is {tp * pp * dp * cp}, not the {devices} devices of num_gpus"
    if not dp and devices % (tp * pp * cp):
        return f"{sizes} is the {devices} devices of num_gpus for no dp"
    return None


def filled_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Missing values that others determine: the data-parallel size by the other sizes, recomputation and precision by notes."""
    notes = values.get("notes", "")
    noted = {"recompute": noted_recompute(notes), "precision": noted_precision(notes)}
    found: dict[str, Any] = {name: value for name, value in noted.items() if value and not values.get(name)}
    devices, tp, pp = (values.get(name) for name in ("num_gpus", "tp", "pp"))
    if not values.get("dp") and devices and tp and pp:
        found["dp"] = devices // (tp * pp * values.get("cp", 1))
    return found


def batch_contradiction(values: Mapping[str, Any]) -> str | None:
    """Why micro-batch x accumulation x dp is not the batch."""
    batch, micro_batch, dp = (values.get(name) for name in ("global_batch", "micro_batch", "dp"))
    if not (batch and micro_batch and dp):
        return None
    sizes, noted = f"micro_batch {micro_batch} x dp {dp}", noted_accumulation(values.get("notes", ""))
    if noted and micro_batch * dp * noted != batch:
        return f"{sizes} x accumulation {noted} is {micro_batch * dp * noted}, not global_batch {batch}"
    if batch % (micro_batch * dp):
        return f"{sizes} does not divide global_batch {batch}"
    return None


def outcome_of(values: Mapping[str, Any], measured: bool) -> tuple[RowOutcome, str | None]:
    """How the run ended, and the error in the row's statement of it, if any: then the outcome is unknown."""
    stated, oom = values.get("outcome"), values.get("oom")
    if stated is None:
        return (RowOutcome.OOM if oom else RowOutcome.OK if oom is False or measured else RowOutcome.UNKNOWN), None
    if stated.lower() not in set(map(str, RowOutcome)):
        return RowOutcome.UNKNOWN, f"outcome {stated!r} is none of {', '.join(RowOutcome)}: the row counts as unknown"
    outcome = RowOutcome(stated.lower())
    if oom is not None and outcome in (RowOutcome.OK, RowOutcome.OOM) and oom != (outcome is RowOutcome.OOM):
        return (
            RowOutcome.UNKNOWN,
            f"outcome {outcome} and oom {str(oom).lower()} contradict each other: the row counts as unknown",
        )
    return outcome, None
