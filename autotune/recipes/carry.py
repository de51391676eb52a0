"""A recipe on another cluster: what stays, what must change and why, and the best layouts by prediction."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.errors import NothingFeasibleError, RequestError
from autotune.frameworks.accelerate import MACHINES, PROCESSES
from autotune.frameworks.check import legality
from autotune.frameworks.framework import LintCase
from autotune.frameworks.shell import LAUNCHER
from autotune.prediction.planning.conditional import ConditionalEstimate
from autotune.prediction.planning.consequences import Verdict, verdict_of
from autotune.prediction.planning.estimate import StepEstimate
from autotune.recipes.assumed import assumptions, conditional
from autotune.recipes.candidates import (
    LEVERS,
    Candidate,
    Refused,
    candidates,
    certain_gain,
    changed_settings,
    is_divisible,
    judged,
    realised,
    refused,
    shortage,
)
from autotune.recipes.outlook import GIB, fits, outlook
from autotune.recipes.recipe import Recipe, Rewritten
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.errors import Finding
from search_spaces.knob_values import value_text
from search_spaces.plain import to_plain
from search_spaces.trial_config import TrialConfig


class BatchRule(StrEnum):
    """What happens with the global batch."""

    FIXED = "fixed"
    """It stays: the optimizer's steps are the same."""
    SCALED = "scaled"
    """It grows with the number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A setting that differs between the recipe and the proposal."""

    name: str
    """The knob, or the setting if it states a size."""
    before: Any
    after: Any
    required: bool
    """Whether the proposal could not run, or not fit, with the old value."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The recipe on the other cluster."""

    recipe: Recipe
    cluster: ClusterSpec
    batch_before: int
    batch: int
    batch_rule: BatchRule
    same: LintCase
    """The recipe with more or fewer data-parallel ranks, and nothing else changed."""
    problems: tuple[Finding, ...]
    """Why that does not run."""
    same_outlook: StepEstimate | str
    """How it runs; else why it is not predicted."""
    candidates: tuple[Candidate, ...]
    """Best first; never empty."""
    conditional: ConditionalEstimate
    """The prediction of the best, with what it assumes."""
    changes: tuple[Change, ...]
    """From the recipe to the best."""
    stays: Mapping[str, Any]
    """Knob -> its value, of the knobs that the recipe states or the proposal could have changed."""
    target: Rewritten
    """The best as a recipe."""


def carry(recipe: Recipe, cluster: ClusterSpec, rule: BatchRule, batch: int | None, top: int) -> Carried:
    """Carry a recipe over to a cluster.

    1. The batch of the recipe, fixed or scaled with the ranks.
    2. The recipe with only the data degree scaled: what lint and the predictions say of it must change.
    3. The layouts of `candidates`. The unchanged layout leads if it runs there, unless another is predicted to be faster beyond
       the error of a predicted ratio: somebody chose it, and knows that it trains.
    4. For each knob of the best that differs the reason: the rule that refuses the old value there, the memory that it lacks,
       or the time that it loses.

    Raises:
        RequestError: the model, the recipe's batch or the ranks behind it are unknown, or no layout divides the batch.
        NothingFeasibleError: nothing is predicted to fit.
    """
    source = recipe.case
    if source.model is None:
        raise RequestError("model", f"{recipe.name} does not say which model it trains", "give --model MODEL")
    before = source.batch
    ranks = source.ranks
    if before is None or (ranks is None and rule is BatchRule.SCALED and batch is None):
        unknown = "its global batch" if before is None else "its ranks, with which the batch is scaled"
        remedies = ["--from NAME:NODES, the cluster that it is for"] if ranks is None else []
        remedies += ["--global-batch-size"] if before is None else []
        raise RequestError("recipe", f"{recipe.name} does not state {unknown}", f"give {', or '.join(remedies)}")
    after = batch or (before if rule is BatchRule.FIXED else _scaled(before, ranks or 1, cluster))
    around = dataclasses.replace(source.around, cluster=cluster, ranks=None)
    target = _with_batch(dataclasses.replace(source, around=around), after)
    same = target.changed(target.sized(source.config, after))
    problems = tuple(legality(same))
    present: StepEstimate | str = outlook(same) if refused(same) is None else "not predicted, because it does not run"
    ranked = _with_unchanged(source, same, present, candidates(target, after, top))[:top]
    if not ranked:
        raise _nothing(target, after)
    best = ranked[0]
    return Carried(
        recipe=recipe, cluster=cluster, batch_before=before, batch=after, batch_rule=rule, same=same, problems=problems,
        same_outlook=present, candidates=tuple(ranked), changes=tuple(_changes(target, best, after)),
        stays={name: value for name, value in _knobs(source, best).items() if getattr(best.config, name) == value},
        target=recipe.text(best.case, best.outlook), conditional=conditional(best.case, best.outlook),
    )  # fmt: skip


def _with_unchanged(source: LintCase, same: LintCase, present: StepEstimate | str, ranked: list[Candidate]) -> list[Candidate]:
    """The candidates with the unchanged layout first, if it fits and no other is certainly faster.

    It fits if it is predicted to, or if it needs no more memory there than where the recipe is known to run.
    """
    if isinstance(present, str):
        return ranked
    before = outlook(source) if source.around.cluster is not None else ""
    ran = (
        isinstance(before, StepEstimate)
        and present.peak_memory_bytes.mean <= before.peak_memory_bytes.mean
        and before.memory_limit_bytes <= present.memory_limit_bytes
    )
    if verdict_of(present) is Verdict.DOES_NOT_FIT or not (fits(present) or ran):
        return ranked
    changed = [candidate for candidate in ranked if candidate.distance]
    fastest = max((candidate.outlook.samples_per_second.mean for candidate in changed), default=0.0)
    if fastest > present.samples_per_second.mean * certain_gain(same):
        return ranked
    return [Candidate(case=same, outlook=present, distance=0), *changed]


def _scaled(batch: int, ranks: int, cluster: ClusterSpec) -> int:
    """The batch with as many samples per rank.

    Raises:
        RequestError: it is not a whole number.
    """
    if batch * cluster.world_size % ranks:
        problem = f"{batch} samples on {ranks} ranks are not a whole number on {cluster.world_size}"
        raise RequestError("batch", problem, "give --target-batch-size N")
    return batch * cluster.world_size // ranks


def _knobs(source: LintCase, best: Candidate) -> dict[str, Any]:
    """The knobs that the recipe states, and those that candidates change, with the recipe's values."""
    names = [*source.imported.knobs, *(name for name in LEVERS if name not in source.imported.knobs)]
    default = TrialConfig()
    return {
        name: getattr(source.config, name)
        for name in dict.fromkeys(names)
        if name in source.imported.keys or getattr(source.config, name) != getattr(default, name)
        or getattr(best.config, name) != getattr(default, name)
    }  # fmt: skip


def _changes(target: LintCase, best: Candidate, batch: int) -> Iterator[Change]:
    """Knobs first, then the settings that state sizes."""
    for name in (*LEVERS, "sequence_parallel"):
        old, new = getattr(target.config, name), getattr(best.config, name)
        if old == new:
            continue
        required, reason = _reason(target, best, name, batch)
        yield Change(name=name, before=old, after=new, required=required, reason=reason)
    written = {key for name in LEVERS if (new := getattr(best.config, name)) != getattr(target.config, name)
               for key in target.framework.write(target, name, new)}  # fmt: skip
    cluster, replicas = best.case.around.cluster, best.case.replicas or 1
    micro = best.config.micro_batch_size
    arithmetic = (
        f"{batch} samples = {micro} of a micro-batch x {batch // (micro * replicas)} micro-batches x {replicas} replicas"
    )
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}" if cluster else ""
    devices = f"the cluster has {nodes} of {cluster.devices_per_node} devices" if cluster else ""
    for key, value in changed_settings(target, best.case).items():
        if key not in written and not key.endswith("sequence_parallel"):
            reason = devices if key.startswith(LAUNCHER) or key in (PROCESSES, MACHINES) else arithmetic
            yield Change(name=key, before=target.get(key), after=value, required=True, reason=reason)


def _reason(target: LintCase, best: Candidate, name: str, batch: int) -> tuple[bool, str]:
    """Whether the best needs the new value of a knob, and why: what the old value would mean there."""
    old = getattr(target.config, name)
    old_text = f"{name}={value_text(old)}"
    if name == "sequence_parallel" and best.config.tensor_parallel_size != target.config.tensor_parallel_size:
        return True, "goes with tensor_parallel_size"
    if name == "hsdp_shard_size" and old and best.config.zero_ranks(target.ranks or 1) % old:
        return True, f"{old} does not divide the {best.config.zero_ranks(target.ranks or 1)} ranks of a stage"
    config = best.config.replace({name: old})
    ranks, size = target.ranks or 1, config.model_parallel_size
    if ranks % size:
        return True, f"with {old_text} a replica has {size} ranks, which do not divide {ranks}"
    step = config.micro_batch_size * (ranks // size)
    if batch % step:
        return True, f"with {old_text} {config.micro_batch_size} x {ranks // size} replicas do not divide {batch} samples"
    reverted = realised(target, config, batch)
    result = None if reverted is None else judged(reverted)
    if result is None:
        return False, "the best combination by prediction"
    if isinstance(result, Refused):
        why = result.findings[0].problem if result.findings else result.why
        return bool(result.findings), f"with {old_text}: {why}"
    if not fits(result):
        chance = f"fits with probability {result.fit_probability:.2f}"
        return True, f"with {old_text}: {shortage(result)} ({chance})"
    ratio = best.outlook.samples_per_second.mean / result.samples_per_second.mean
    if ratio < 1.02:  # a smaller difference is not called faster
        return False, f"predicted as fast as with {old_text}, in this combination"
    return False, f"predicted {ratio:.2f} times as fast as with {old_text}"


def _with_batch(target: LintCase, batch: int) -> LintCase:
    return dataclasses.replace(target, around=dataclasses.replace(target.around, global_batch_size=batch))


def _nothing(target: LintCase, batch: int) -> RequestError | NothingFeasibleError:
    """Why there is no candidate."""
    ranks, cluster = target.ranks or 1, target.around.cluster
    title = target.framework.title
    if not is_divisible(target, batch):
        nearest_batch = max(round(batch / ranks), 1) * ranks
        problem = f"no layout that {title}'s settings can state on {ranks} ranks divides {batch} samples"
        return RequestError("batch", problem, f"give --target-batch-size {nearest_batch}")
    memory = cluster.device.memory_bytes / GIB if cluster else 0
    problem = f"no layout that {title}'s settings can state is predicted to fit {ranks} devices of {memory:.0f} GiB"
    if assumed := assumptions(target):
        problem += f" with {', '.join(map(str, assumed))}, not stated in the recipe"
    larger = -(-batch // ranks) * ranks
    if batch < ranks and candidates(_with_batch(target, larger), larger, 1):
        problem = f"a batch of {batch} allows at most {batch} data-parallel replicas, and {problem}"
        return RequestError("batch", problem, f"give --target-batch-size {larger}, or --batch scaled")
    return NothingFeasibleError("to", problem, "give more nodes, or a smaller sequence")


def document(carried: Carried) -> dict[str, Any]:
    """The JSON representation."""
    same = carried.same_outlook
    target = carried.target
    return {
        "recipe": carried.recipe.name,
        "format": carried.recipe.case.framework.name,
        "model": carried.recipe.case.model.name if carried.recipe.case.model else None,
        "from": {
            "cluster": carried.recipe.cluster.name if carried.recipe.cluster else None,
            "ranks": carried.recipe.case.ranks,
        },
        "to": {"cluster": carried.cluster.name, "nodes": carried.cluster.nodes, "ranks": carried.cluster.world_size},
        "batch": {"rule": carried.batch_rule.value, "before": carried.batch_before, "after": carried.batch},
        "unchanged_layout": {
            "problems": [
                {name: value for name, value in to_plain(finding).items() if name != "fix"} for finding in carried.problems
            ],
            "fits": None if isinstance(same, str) else fits(same),
            "predicted": None if isinstance(same, str) else _predicted(same),
            "not_predicted": same if isinstance(same, str) else None,
        },
        "stays": dict(carried.stays),
        "changes": [dataclasses.asdict(change) for change in carried.changes],
        "candidates": [
            {
                "settings": changed_settings(carried.recipe.case, candidate.case),
                "differences": {
                    name: getattr(candidate.config, name)
                    for name in LEVERS
                    if getattr(candidate.config, name) != getattr(carried.recipe.case.config, name)
                },
                **_predicted(candidate.outlook),
            }
            for candidate in carried.candidates
        ],
        "notes": list(carried.recipe.case.imported.notes),
        "assumed": carried.conditional.conditions.document(),
        "target": {
            "file": target.name,
            "anew": target.anew,
            "lost": list(target.lost),
            "notes": list(target.notes),
            "text": target.text,
        },
    }


def _predicted(outlook: StepEstimate) -> dict[str, Any]:
    rate = outlook.samples_per_second
    return {
        "samples_per_second": dataclasses.asdict(rate),
        "peak_memory_bytes": outlook.peak_memory_bytes.mean,
        "fit_probability": outlook.fit_probability,
    }
