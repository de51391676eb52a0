"""Layouts that a recipe can have on a cluster, by prediction, each as the settings that give it."""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.errors import AutotuneError
from autotune.frameworks.check import legality, written
from autotune.frameworks.framework import LintCase, Settings
from autotune.prediction.equations.step import Z90, predict
from autotune.prediction.planning.estimate import StepEstimate, alike, learned
from autotune.prediction.planning.memory_fit import memory_limits_of
from autotune.prediction.planning.ties import RESOLUTION, resolution
from autotune.recipes.outlook import GIB, STOPS, fits, outlooks, question_about, unpredictable
from search_spaces.errors import Finding, SearchSpaceError
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
LEVERS = (
    *DEGREES, "virtual_stages", "zero_stage", "hsdp_shard_size", "micro_batch_size", "activation_checkpointing",
    "offload_optimizer",
)  # fmt: skip
"""Knobs that a candidate may have otherwise than the recipe, as far as the framework's settings state them."""
LARGEST: Mapping[str, int] = {
    "tensor_parallel_size": 16, "pipeline_parallel_size": 64, "context_parallel_size": 16, "expert_parallel_size": 128,
    "micro_batch_size": 8,
}  # fmt: skip
"""Largest power of two that is tried; a recipe's own value always is."""
CHOICES: Mapping[str, tuple[Value, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "activation_checkpointing": ("none", "selective", "full"),
}
NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable: `RESOLUTION` is the median error between two configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout of the recipe."""

    case: LintCase
    """With its settings, as the framework reads them."""
    outlook: StepEstimate
    distance: int
    """Number of `LEVERS` in which it differs from the recipe."""

    @property
    def config(self) -> TrialConfig:
        """Its knobs."""
        return self.case.config


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A layout that cannot be run, or cannot be predicted."""

    findings: tuple[Finding, ...] = ()
    why: str = ""


def realised(case: LintCase, config: TrialConfig, batch: int) -> LintCase | None:
    """The case with settings for the layout and its batch, as the framework reads them; None: they do not state it.

    `case`: the recipe in the surroundings of the cluster.
    """
    try:
        changed = case
        for name in LEVERS:
            value = getattr(config, name)
            if name == "hsdp_shard_size" or getattr(changed.config, name) == value:
                continue
            settings = _written(changed, name, value)
            if not settings:
                if name in ("virtual_stages", "zero_stage"):  # another setting may state it; compared below
                    continue
                return None
            changed = changed.changed(settings)
        if config.sequence_parallel and not changed.config.sequence_parallel and changed.config.tensor_parallel_size > 1:
            changed = changed.changed(case.framework.write(changed, "sequence_parallel", True))
        changed = changed.changed(changed.sized(config, batch))
    except (AutotuneError, SearchSpaceError, ZeroDivisionError):
        return None
    same = all(getattr(changed.config, name) == getattr(config, name) for name in LEVERS)
    return changed if same and stated_batch(changed) in (None, batch) else None


def stated_batch(case: LintCase) -> int | None:
    """Samples per optimizer step that the settings themselves state; None: they do not, or the ranks are not known."""
    imported = case.imported
    if imported.global_batch_size is not None:
        return imported.global_batch_size
    return imported.samples_per_rank * case.replicas if imported.samples_per_rank and case.replicas else None


def _written(case: LintCase, name: str, value: Value) -> Settings:
    """The settings that give a knob a value; stages per rank have a setting only if the recipe states them in one."""
    if name == "virtual_stages":
        key = case.imported.keys.get(name, "")
        has_own_setting = key.endswith(("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"))
        return {key: None if value == 1 else value} if has_own_setting else case.framework.write(case, name, value)
    return case.framework.write(case, name, value)


def refused(case: LintCase) -> Refused | None:
    """Why a realised layout cannot be run or predicted; None: it can."""
    findings = tuple(finding for finding in legality(case) if finding.effect in STOPS)
    why = "" if findings else unpredictable(case)
    return Refused(findings=findings, why=why) if findings or why else None


def judged(case: LintCase) -> StepEstimate | Refused:
    """A realised layout's prediction, or why it cannot be run or predicted."""
    return refused(case) or outlooks(case, [case])[0] or Refused(why="the equations do not know this layout")


def is_divisible(case: LintCase, batch: int) -> bool:
    """Whether any layout of the settings divides the batch, whether it fits or not."""
    return next(_layouts(case, batch, offloads=False, most_changes=len(LEVERS)), None) is not None


def candidates(case: LintCase, batch: int, top: int, most_changes: int = len(LEVERS)) -> list[Candidate]:
    """The layouts that are predicted to fit, best first; `most_changes`: the largest distance from the recipe.

    1. All combinations of the values that the framework can state, without those whose arithmetic is impossible.
    2. Predict them at once. Those that fit, the fastest first, are written as settings, read back as the framework reads them,
       and checked by its table and by our rules; the rest of the prediction is that of the checked ones.
    3. Layouts that the equations cannot distinguish from the fastest are ordered by their distance from the recipe: every
       change is a risk that the prediction does not show.

    Offloading is tried only if nothing fits without it.
    """
    for offloads in (False, True):
        ranked = _ranked(case, batch, offloads, most_changes)[:40]  # those that are written as settings, read back and checked
        written = [candidate for candidate in (realised(case, config, batch) for config in ranked) if candidate is not None]
        if predicted := _predicted(case, [candidate for candidate in written if refused(candidate) is None]):
            return _in_order(predicted)[:top]
    return []


def _predicted(source: LintCase, cases: Sequence[LintCase]) -> list[Candidate]:
    """Those that fit. Cases whose model the framework divides alike are predicted together."""
    groups: dict[ModelSpec, list[LintCase]] = {}
    for case in cases:
        assert case.model is not None
        groups.setdefault(case.framework.as_run(case.model, case.config), []).append(case)
    return [
        Candidate(
            case=case,
            outlook=outlook,
            distance=sum(getattr(case.config, name) != getattr(source.config, name) for name in LEVERS),
        )
        for group in groups.values()
        for case, outlook in zip(group, outlooks(group[0], group), strict=True)
        if outlook is not None and fits(outlook)
    ]


def faster(case: LintCase, present: StepEstimate) -> str:
    """A legal layout near the recipe that is certainly faster by prediction, with its rate; empty: there is none, or the
    program that trains decides a part of the layout.
    """
    if case.batch is None or case.tokens is None or case.assumed.keys() & {*LEVERS}:
        return ""
    nearest = candidates(case, case.batch, 1, most_changes=2)
    if not nearest:
        return ""
    best = nearest[0].outlook
    if best.samples_per_second.mean < present.samples_per_second.mean * certain_gain(case):
        return ""
    same = realised(case, case.config, case.batch) or case  # with the settings of the cluster's size
    changes = written(changed_settings(same, nearest[0].case))
    rates = f"{best.tflops_per_device:.0f} instead of {present.tflops_per_device:.0f} TFLOP/s a device"
    return f"faster by prediction: {changes}: {rates}, {best.fullest.needed / GIB:.0f} GiB"


def changed_settings(source: LintCase, case: LintCase) -> dict[str, Any]:
    """Setting -> its value in a case, of those that differ from the source's; None: left out."""
    present, settings = source.imported.settings, case.imported.settings
    return {key: settings.get(key) for key in {**present, **settings} if settings.get(key) != present.get(key)}


def certain_gain(case: LintCase) -> float:
    """Ratio of predicted rates from which one layout is faster with a probability of 95 %."""
    question = question_about(case)
    # Standard deviation of the error of the ratio of two predicted rates of one model, in log.
    spread = RESOLUTION * (question.rates.time_spread if question else 0.0) / NORMAL_MEDIAN
    return math.exp(Z90 * spread)


def tie_ratio(case: LintCase) -> float:
    """Ratio of predicted rates up to which two layouts tie."""
    question = question_about(case)
    return 1 + resolution(question.rates.time_spread if question else 0.0)


def _in_order(unordered: Sequence[Candidate]) -> list[Candidate]:
    """Groups of ties, the fastest group first; in a group the nearest first."""
    remaining = sorted(unordered, key=lambda item: -item.outlook.samples_per_second.mean)
    ordered: list[Candidate] = []
    while remaining:
        tie = tie_ratio(remaining[0].case)
        group = [
            item
            for item in remaining
            if item.outlook.samples_per_second.mean * tie >= remaining[0].outlook.samples_per_second.mean
        ]
        ordered += sorted(group, key=lambda item: (item.distance, -item.outlook.samples_per_second.mean))
        remaining = remaining[len(group) :]
    return ordered


def _ranked(case: LintCase, batch: int, offloads: bool, most_changes: int) -> list[TrialConfig]:
    """Layouts that are predicted to fit, the fastest first."""
    groups: dict[ModelSpec, list[TrialConfig]] = {}
    assert case.model is not None
    # Number of predicted layouts. Of more, those that are furthest from the recipe are left out.
    for config in itertools.islice(_layouts(case, batch, offloads, most_changes), 30_000):
        try:
            groups.setdefault(case.framework.as_run(case.model, config), []).append(config)
        except SearchSpaceError:
            continue
    scored: list[tuple[float, int, TrialConfig]] = []
    for model, configs in groups.items():
        question = question_about(case, model, batch)
        if question is None:
            continue
        limits, predicted = memory_limits_of(question), [config.replace(case.framework.predicted) for config in configs]
        for places, cases in alike(question, predicted):
            prediction, count = predict(cases, question.rates), len(places)
            seconds = np.broadcast_to(prediction.seconds, count) * learned(question, cases, [predicted[at] for at in places])
            needed, host = (np.broadcast_to(values, count) for values in (prediction.memory.needed, prediction.memory.host))
            fits = limits.holds(needed, host)
            scored += [(float(seconds[row]), at, configs[at]) for row, at in enumerate(places) if fits[row]]
    return [config for _, _, config in sorted(scored, key=lambda item: item[:2])]


def _layouts(case: LintCase, batch: int, offloads: bool, most_changes: int) -> Iterator[TrialConfig]:
    """Combinations whose arithmetic is possible, near ones first."""
    model, ranks, config, tokens = case.model, case.ranks or 1, case.config, case.tokens or 1
    assert model is not None
    values = {name: _values(case, name, offloads) for name in LEVERS if name not in ("virtual_stages", "hsdp_shard_size")}
    recipe_point = tuple(options[0] for options in values.values())
    for point in itertools.product(*values.values()):
        if sum(map(operator.ne, point, recipe_point)) > most_changes:
            continue
        chosen = dict(zip(values, point, strict=True))
        tensor, pipeline, context, experts = (int(chosen[name]) for name in DEGREES)
        if ranks % (tensor * pipeline * context):
            continue
        replicas = ranks // (tensor * pipeline * context)
        micro = int(chosen["micro_batch_size"])
        if batch % (micro * replicas) or replicas % experts or pipeline > model.num_layers:
            continue
        if experts > 1 and model.num_experts % experts:
            continue
        # Samples are divided over ranks only if each keeps at least 8192 tokens, or the recipe divides them already.
        if context > max(config.context_parallel_size, tokens // 8192):
            continue
        sequences = [(config.sequence_parallel or config.tensor_parallel_size == 1) and tensor > 1]
        if tensor > 1 and not sequences[0] and _states(case, "sequence_parallel", True):
            sequences.append(True)
        shard_sizes = _shards(case, chosen, replicas * context)
        for stages, shards, sequence in itertools.product(_stages(case, pipeline), shard_sizes, sequences):
            same_stages = (pipeline, stages) == (config.pipeline_parallel_size, config.virtual_stages)
            yield config.replace(
                chosen | {"virtual_stages": stages, "hsdp_shard_size": shards, "sequence_parallel": sequence}
                | ({} if pipeline > 1 else {"pipeline_schedule": TrialConfig().pipeline_schedule})
                | ({} if same_stages else {"pipeline_layout": ""})  # the layers of other stages; the written case has its own
            )  # fmt: skip


def _stages(case: LintCase, pipeline: int) -> list[int]:
    """Numbers of stages of a rank."""
    virtual_stages, layers = case.config.virtual_stages, case.model.num_layers if case.model else 1
    if pipeline == 1:
        return [1]
    stage_counts = [virtual_stages] if case.config.pipeline_parallel_size > 1 else [1]
    if "virtual_stages" in case.imported.keys:
        stage_counts += [2**power for power in range(1, 6)]
    return [
        stages for stages in dict.fromkeys(stage_counts) if pipeline * stages <= layers and layers % (pipeline * stages) == 0
    ] or [virtual_stages if pipeline * virtual_stages <= layers else 1]


def _shards(case: LintCase, chosen: Mapping[str, Value], zero_ranks: int) -> list[int]:
    """Ranks that a copy of the states is divided over: all, as in the recipe, or the ranks of a node."""
    shard_size, cluster = case.config.hsdp_shard_size, case.around.cluster
    if chosen["zero_stage"] != 3 or cluster is None or case.framework.name not in ("torchtitan", "best-config"):
        return [0 if chosen["zero_stage"] != 3 or shard_size >= zero_ranks else shard_size]
    inner = int(chosen["tensor_parallel_size"])
    node = cluster.devices_per_node // inner
    options = [0, shard_size, node * int(chosen["context_parallel_size"]), 4 * node]
    return [size for size in dict.fromkeys(options) if size == 0 or (1 < size < zero_ranks and zero_ranks % size == 0)]


def _values(case: LintCase, name: str, offloads: bool) -> list[Value]:
    """The recipe's own value, then others that its settings can state, the nearest first."""
    recipe_value, options = getattr(case.config, name), list(CHOICES.get(name, ()))
    if name in LARGEST:
        most = min(LARGEST[name], case.ranks or 1) if name in DEGREES else LARGEST[name]
        if name == "tensor_parallel_size" and case.around.cluster is not None:
            most = min(most, max(case.around.cluster.linked_devices, 1))
        if name == "expert_parallel_size" and case.model is not None:
            most = min(most, max(case.model.num_experts, 1))
        options = [2**power for power in range(max(most, 1).bit_length()) if 2**power <= most]
        options.sort(key=lambda value: abs(math.log(value / max(recipe_value, 1))))
    elif name == "offload_optimizer":
        options = ["none", "cpu"] if offloads else ["none"]
    return [recipe_value, *(value for value in options if value != recipe_value and _states(case, name, value))]


def _states(case: LintCase, name: str, value: Value) -> bool:
    """Whether the framework's settings can give the knob this value."""
    try:
        return bool(case.framework.write(case, name, value))
    except (AutotuneError, SearchSpaceError, ZeroDivisionError):
        return False


def shortage(outlook: StepEstimate) -> str:
    """Why a layout does not fit, with its arithmetic."""
    needed, limit = outlook.fullest.needed / GIB, outlook.memory_limit_bytes / GIB
    return f"predicted {needed:.0f} GiB of {limit:.0f} GiB on the fullest device"
