"""A recipe that the user names: a file that lint reads, a job, or a best-config document, which can be written again."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import BestConfigError, RequestError
from autotune.exports.best_config_file import best_config_text, request_of
from autotune.imports.imported import Imported
from autotune.imports.read import BEST_CONFIG as BEST_CONFIG_KEYS
from autotune.imports.read import Written, read_table, read_written
from autotune.lint.case import Framework, LintCase, Settings, Surroundings
from autotune.lint.changes import BATCH
from autotune.lint.legality import undecided_settings
from autotune.lint.lint import case_of
from autotune.lint.memory import LintPrediction
from autotune.recipes.candidates import LEVERS
from autotune.recipes.rewriting import Rewritten, rewritten
from autotune.recipes.sizes import BEST_CONFIG
from autotune.request.rows import request_to_row
from autotune.session.placement import launch_of
from autotune.session.resolve import resolve
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, check_value
from search_spaces.models.model import ModelSpec
from search_spaces.plain import to_plain
from search_spaces.rules.table import RULES
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe as it is."""

    name: str
    case: LintCase
    document: Mapping[str, Any] | None
    """The best-config document; None: it is another framework's file."""
    written: Written | None
    cluster: ClusterSpec | None
    """Where it runs; None: not known."""

    def text(self, case: LintCase, outlook: LintPrediction) -> Rewritten:
        """The recipe with another layout, in its own format."""
        if self.document is not None:
            return Rewritten(text=best_config_text(document_for(self.document, case, outlook)), name="best-config.json")
        assert self.written is not None
        return rewritten(self.written, case.imported.settings)


def recipe_of(name: str, around: Surroundings, find_job: Callable[[str], Mapping[str, Any]]) -> Recipe:
    """Read a recipe.

    Args:
        name: a file; FILE:FUNCTION for a Python file with several recipes; a job's id.
        around: what the user says beside it; the cluster is the one that it runs on.
        find_job: the best-config document of a job.

    Raises:
        RequestError: the file cannot be read, or has several recipes.
        BestConfigError: the document cannot be read.
        StorageError: there is neither such a file nor such a job.
    """
    file, _, function = name.partition(".py:")
    path = Path(f"{file}.py" if function else name)
    if not path.exists() and not path.suffix and "/" not in name:
        return _of_document(find_job(name), f"job {name}", around)
    if path.suffix == ".json" and path.exists() and read_table(path).keys() >= BEST_CONFIG_KEYS:
        return _of_document(read_table(path), path.name, around)
    recipes = [recipe for recipe in read_written(path) if not function or recipe.name == f"{path.name}:{function}"]
    if len(recipes) != 1:
        names = ", ".join(recipe.name for recipe in (recipes or read_written(path))[:5])
        raise RequestError("recipe", f"{path} has the recipes {names}", f"name one of them, as {path}:FUNCTION")
    case = case_of(recipes[0], around)
    if undecided := undecided_settings(case):
        problem = f"{path} decides {', '.join(undecided)} when it runs"
        raise RequestError("recipe", problem, "write the values into it, or give --global-batch-size and --sequence-length")
    return Recipe(name=recipes[0].name, case=case, document=None, written=recipes[0], cluster=around.cluster)


def _of_document(document: Mapping[str, Any], name: str, around: Surroundings) -> Recipe:
    settings, model, cluster = settings_of(document)
    surroundings = Surroundings(
        model=around.model or model, cluster=around.cluster or cluster, global_batch_size=around.global_batch_size,
        sequence_length=around.sequence_length or request_of(document).sequence_length,
    )  # fmt: skip
    case = LintCase(
        framework=BEST_CONFIG_FRAMEWORK, imported=BEST_CONFIG_FRAMEWORK.read(settings, name), around=surroundings, source=name
    )
    return Recipe(name=name, case=case, document=document, written=None, cluster=surroundings.cluster)


def _read(settings: Settings, source: str) -> Imported:
    del source
    knobs = {name: check_value(name, value) for name, value in settings.items() if name in KNOBS}
    keys = {name: name for name in knobs}
    if TrialConfig().replace(knobs).pipeline_parallel_size > 1:
        keys["virtual_stages"] = "virtual_stages"
    return Imported(knobs=knobs, global_batch_size=settings[BATCH], settings=settings, format=BEST_CONFIG, keys=keys)


def _write(case: LintCase, knob: str, value: Value) -> Settings:
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


BEST_CONFIG_FRAMEWORK = Framework(
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


def document_for(document: Mapping[str, Any], case: LintCase, outlook: LintPrediction) -> dict[str, Any]:
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
