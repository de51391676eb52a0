"""What a configuration that lacks memory can change so that it is predicted to fit, in the order in which people try it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from autotune.errors import AutotuneError
from autotune.frameworks.check import legality, single_changes, written
from autotune.frameworks.framework import LintCase, Settings
from autotune.prediction.planning.conditional import ConditionalEstimate
from autotune.prediction.planning.consequences import Verdict, verdict_of
from autotune.prediction.planning.estimate import StepEstimate
from autotune.recipes.assumed import with_values
from autotune.recipes.outlook import GIB, fits, outlook, outlooks
from search_spaces.errors import Effect, Finding, SearchSpaceError
from search_spaces.knob import Value
from search_spaces.trial import DryRun

RULE = "memory"
LEVERS = (
    "activation_checkpointing", "checkpoint_every_k", "micro_batch_size", "zero_stage", "reshard_after_forward",
    "expert_parallel_size", "sequence_parallel", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size",
    "offload_optimizer",
)  # fmt: skip
"""Knobs that save memory, in the order in which people try them."""
FRUGAL: Mapping[str, Value] = {"activation_checkpointing": "full", "micro_batch_size": 1}
"""Values with which a configuration needs least memory, of knobs that a file may leave to the program that trains."""
MOST_GROWTH = 64
"""Largest multiple of the nodes that is tried."""

Variant = tuple[Settings, LintCase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change with which the configuration is predicted to fit."""

    changes: Settings
    """Empty: only the number of devices changes."""
    devices: str = ""
    """The number of devices in words; empty: it stays."""
    program: str = ""
    """What the program that trains must do too, in words; empty: nothing."""
    estimate: StepEstimate

    def __str__(self) -> str:
        steps = " and ".join(filter(None, (written(self.changes), self.devices)))
        return f"{steps}: {self.estimate.fullest.needed / GIB:.0f} GiB{self.program}"


def fit(case: LintCase, answer: ConditionalEstimate) -> Iterator[Finding]:
    """The finding that the configuration does not fit: an error if it fits with no plausible value of what is assumed, a
    condition if it fits with some."""
    estimate, least = answer.estimate, answer.most_favourable
    if verdict_of(estimate) is not Verdict.DOES_NOT_FIT:
        return
    figure = f"{estimate.fullest.needed / GIB:.0f} GiB of {estimate.memory_limit_bytes / GIB:.0f} GiB"
    if verdict_of(least) is Verdict.DOES_NOT_FIT:
        problem = f"predicted {figure} on the fullest device (fits with probability {estimate.fit_probability:.2f})"
        if answer.favourable_values:
            values = ", ".join(f"{name}={value}" for name, value in answer.favourable_values.items())
            problem += f", and {least.fullest.needed / GIB:.0f} GiB even with {values}"
        yield lacking(case, problem, _remedy(case))
        return
    remedy = remedy_of(case)
    flips = {item.assumption.name for item in answer.conditions.results if item.changes_verdict} or {*answer.favourable_values}
    stated = [item for item in answer.conditions.assumed if item.name in flips]
    present = ", ".join(item.words(item.value) for item in stated)
    finding = lacking(case, f"{answer.condition.removeprefix('as assumed; ')}; with {present} {figure}", remedy)
    text = "state " + " and ".join(f"{item.name} ({item.stated_by})" for item in stated)
    text += f", or {finding.remedy}" if remedy is not None else ""
    key = next(iter(finding.fix), case.key_of(stated[0].name))
    yield dataclasses.replace(finding, key=key, effect=Effect.MAY_NOT_FIT, remedy=text)


def lacking(case: LintCase, problem: str, remedy: Remedy | None) -> Finding:
    """The finding that the configuration lacks memory, with the change that makes it fit."""
    nothing = f"no change of its settings and no number of devices up to {MOST_GROWTH} times as many fits; use a smaller model"
    changes = remedy.changes if remedy is not None else {}
    return Finding(
        rule=RULE, key=next(iter(changes), case.key_of("micro_batch_size")), effect=Effect.DOES_NOT_FIT, problem=problem,
        remedy=nothing if remedy is None else str(remedy), fix=changes,
    )  # fmt: skip


def _remedy(case: LintCase) -> Remedy | None:
    """The first change that fits, if need be with the least memory that the program that trains can do with."""
    if (remedy := remedy_of(case)) is not None:
        return remedy
    frugal = {name: value for name, value in FRUGAL.items() if case.assumed.get(name, value) != value}
    if not frugal or (remedy := remedy_of(with_values(case, frugal))) is None:
        return None
    words = " and ".join(f"{name}={value}" for name, value in frugal.items())
    return dataclasses.replace(remedy, program=f" with {words}, which the program that trains decides")


def remedy_of(case: LintCase) -> Remedy | None:
    """The first change that fits, in the order in which people try them; None: there is none.

    1. Single changes: of the first knob of `LEVERS` with which it fits, the fastest value.
    2. Pairs of them, those of the first knobs first.
    3. The change of each knob that needs least memory, one after the other, until it fits; without those that are not needed.
    4. More devices, with the unchanged settings or with those of 3, if they divide the states; replicas need as much on any
       number.
    """
    rules_before = {finding.rule for finding in legality(case)}

    def variants(source: LintCase, lever: str) -> list[Variant]:
        """Legal changes of a knob."""
        # Values of a lever that are tried, the nearest first.
        changes = itertools.islice(single_changes(source, (lever,)), 12)
        return [
            (settings, changed)
            for settings, changed in changes
            if getattr(changed.config, lever) != getattr(source.config, lever)
            and {finding.rule for finding in legality(changed)} <= rules_before
        ]

    singles = {lever: variants(case, lever) for lever in LEVERS}
    for lever in LEVERS:
        if (remedy := fastest(case, singles[lever])) is not None:
            return remedy
    for second, first in itertools.product(LEVERS, LEVERS):
        if LEVERS.index(first) < LEVERS.index(second) and singles[first] and singles[second]:
            pairs = [
                ({**changes, **further}, changed_again)
                for changes, changed in singles[first]
                for further, changed_again in variants(changed, second)
                if not set(further) & set(changes)
            ]
            if (remedy := fastest(case, pairs)) is not None:
                return remedy
    applied = _accumulated(case, variants)
    settings, changed = applied
    estimate = outlook(changed)
    if isinstance(estimate, StepEstimate) and fits(estimate):
        return Remedy(changes=settings, estimate=estimate)
    return _with_more_devices([({}, case), applied])


def fastest(case: LintCase, changes: Sequence[Variant]) -> Remedy | None:
    """The fastest of the changes that fit."""
    try:
        predictions = outlooks(case, [changed for _, changed in changes])
    except SearchSpaceError:
        return None
    ranked = sorted(
        (-prediction.samples_per_second.mean, index)
        for index, prediction in enumerate(predictions)
        if prediction is not None and fits(prediction)
    )
    for _, index in ranked:
        settings, changed = changes[index]
        estimate = outlook(changed)  # the model as the framework divides it in this layout
        if isinstance(estimate, StepEstimate) and fits(estimate):
            return Remedy(changes=settings, estimate=estimate)
    return None


def _accumulated(case: LintCase, variants: Callable[[LintCase, str], list[Variant]]) -> Variant:
    """The changes that need least memory, one knob after the other, until it fits; then without each that is not needed."""
    steps: dict[str, Settings] = {}
    changed, present = case, outlook(case)
    for lever in (*LEVERS, *LEVERS):  # sharding may make room for a setting before it
        if isinstance(present, str) or fits(present):
            break
        options = [(settings, variant, outlook(variant)) for settings, variant in variants(changed, lever)]
        needs = [math.inf if isinstance(estimate, str) else estimate.fullest.needed for _, _, estimate in options]
        if min(needs, default=math.inf) < present.fullest.needed:
            settings, changed, present = options[needs.index(min(needs))]
            steps[lever] = {**steps.get(lever, {}), **settings}
    for lever in list(steps):
        fewer = {key: value for name, settings in steps.items() if name != lever for key, value in settings.items()}
        with suppress(AutotuneError, SearchSpaceError):
            shorter = case.changed(fewer)
            estimate = outlook(shorter)
            if isinstance(estimate, StepEstimate) and fits(estimate):
                del steps[lever]
                changed = shorter
    return {key: value for settings in steps.values() for key, value in settings.items()}, changed


def _with_more_devices(changes: Sequence[Variant]) -> Remedy | None:
    """The smallest multiple of the nodes on which one of the changes fits."""
    for settings, changed in changes:
        cluster, config = changed.around.cluster, changed.config
        if cluster is None or changed.around.ranks is not None:
            continue
        for factor in (2**power for power in range(1, MOST_GROWTH.bit_length())):
            with suppress(AutotuneError, SearchSpaceError):
                larger = dataclasses.replace(cluster, nodes=cluster.nodes * factor)
                batch = max(changed.batch or 1, config.micro_batch_size * larger.world_size // config.model_parallel_size)
                around = dataclasses.replace(changed.around, cluster=larger, global_batch_size=batch)
                moved = dataclasses.replace(changed, around=around)
                estimate = outlook(moved.changed(moved.sized(config, batch)))
                if isinstance(estimate, StepEstimate) and fits(estimate):
                    devices = f"use {larger.world_size} devices ({larger.nodes} nodes)"
                    return Remedy(changes=settings, devices=devices, estimate=estimate)
    return None


def exact(case: LintCase, run: DryRun) -> Iterator[Finding]:
    """The finding that the peak of the dry run exceeds the device's memory."""
    assert case.around.cluster is not None
    limit = case.around.cluster.device.memory_bytes
    if run.peak_memory_bytes > limit:
        problem = f"a dry run needs {run.peak_memory_bytes / GIB:.1f} GiB of {limit / GIB:.1f} GiB on the fullest device"
        yield lacking(case, problem, _remedy(case))
