"""A best-config document as a recipe: its settings are our knobs, and it is written again for another cluster."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.errors import BestConfigError
from autotune.exports.best_config_file import best_config_text, request_of
from autotune.imports.imported import Imported
from autotune.lint.case import Case, Framework, Settings
from autotune.lint.changes import BATCH
from autotune.lint.memory import Outlook
from autotune.recipes.candidates import LEVERS
from autotune.recipes.sizes import BEST_CONFIG
from autotune.request.rows import request_to_row
from autotune.session.placement import launch_of
from autotune.session.resolve import resolve
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, check_value
from search_spaces.models.model import ModelSpec
from search_spaces.plain import to_plain
from search_spaces.rules.table import RULES
from search_spaces.trial_config import TrialConfig


def _read(settings: Settings, source: str) -> Imported:
    del source
    knobs = {name: check_value(name, value) for name, value in settings.items() if name in KNOBS}
    keys = {name: name for name in knobs}
    if TrialConfig().replace(knobs).pipeline_parallel_size > 1:
        keys["virtual_stages"] = "virtual_stages"
    return Imported(knobs=knobs, global_batch_size=settings[BATCH], settings=settings, format=BEST_CONFIG, keys=keys)


def _write(case: Case, knob: str, value: Value) -> Settings:
    """Sequence parallelism goes with tensor parallelism, unless the recipe has the latter without it."""
    changes: dict[str, Value] = {knob: value}
    if knob == "tensor_parallel_size":
        changes["sequence_parallel"] = int(value) > 1 and (
            case.config.sequence_parallel or case.config.tensor_parallel_size == 1
        )
    if knob == "pipeline_parallel_size" and value == 1:
        changes |= {"virtual_stages": 1, "pipeline_schedule": TrialConfig().pipeline_schedule, "pipeline_layout": ""}
    if knob == "zero_stage" and value != 3:
        changes["hsdp_shard_size"] = 0
    return changes


FRAMEWORK = Framework(
    name=BEST_CONFIG, title="Autotune", checked="", read=_read, checks=(), rules=frozenset(rule.name for rule in RULES),
    keys={name: name for name in (*LEVERS, BATCH)}, write=_write,
)  # fmt: skip


def settings_of(document: Mapping[str, Any]) -> tuple[dict[str, Any], ModelSpec, Any]:
    """The document's settings, its model and its cluster.

    Raises:
        BestConfigError: its request cannot be read, or its model has no shape: a user's module or script.
    """
    request = request_of(document)
    model, cluster = request.resolved_model, request.resolved_cluster
    if not isinstance(model, ModelSpec):
        problem = "is about a module or a script, whose layouts cannot be predicted"
        raise BestConfigError("model", problem, "give a recipe of a model with a preset or a config.json")
    return {**document["best"]["config"], BATCH: request.global_batch_size}, model, cluster


def tokens_of(document: Mapping[str, Any]) -> int:
    """Tokens of a sample."""
    return request_of(document).sequence_length


def document_for(document: Mapping[str, Any], case: Case, outlook: Outlook) -> dict[str, Any]:
    """The document for another cluster: nothing is measured, so its rates are predicted.

    Args:
        document: the source.
        case: the layout on the cluster.
        outlook: its prediction.
    """
    cluster, request = case.around.cluster, request_of(document)
    assert cluster is not None and case.batch is not None
    moved = dataclasses.replace(
        request, cluster=cluster.name, ranks=None, resolved_cluster=cluster, global_batch_size=case.batch, tune_on=None,
        answer_for=None, baseline=None,
    )  # fmt: skip
    estimate = outlook.estimate
    rate = estimate.samples_per_second
    best = {
        "trial": 0,
        "config": case.config.values(),
        "measured": None,
        "predicted": {
            "samples_per_second": to_plain(rate), "repeats": 0, "extrapolated": [], "step_seconds": case.batch / rate.mean,
            "peak_memory_bytes": [
                {"rank": rank.pipeline_rank, "total": round(rank.total), "by_tag": _whole(rank.by_tag)}
                for rank in estimate.ranks
            ],
            "tflops_per_device": estimate.tflops_per_device, "mfu": estimate.mfu, "hfu": None,
            "flops_convention": estimate.document(every_rank=False)["predicted"].get("flops_convention", "palm-appendix-b"),
        },
    }  # fmt: skip
    job = {
        **document["job"], "trials": 0, "tie": False, "runner_up": None, "reference_losses": [],
        "message": f"carried to {cluster.name}", "request": request_to_row(moved),
    }  # fmt: skip
    job.pop("spent", None)
    gone = ("decision", "extrapolated", "environments", "verification")
    return {
        **{key: value for key, value in document.items() if key not in gone},
        "job": job,
        "cluster": to_plain(cluster),
        "best": best,
        "baseline": None,
        "alternatives": [],
        "launch": launch_of(case.config, resolve(moved)),
        "verified": "native-only",
    }


def _whole(sizes: Mapping[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items()}


def text_for(document: Mapping[str, Any], case: Case, outlook: Outlook) -> str:
    """`document_for` as a file's text."""
    return best_config_text(document_for(document, case, outlook))
