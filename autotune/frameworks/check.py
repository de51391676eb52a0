"""Findings that need no prediction (a framework's table, our rules, expert groups), and the smallest change without them."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from autotune.errors import AutotuneError
from autotune.frameworks.framework import BATCH, LintCase, Settings
from search_spaces.capability import Rule, SpaceContext
from search_spaces.clusters.cluster import ClusterSpec, DeviceSpec
from search_spaces.errors import Effect, Finding, ModelFormatError, SearchSpaceError
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.models.command import CommandModel
from search_spaces.rules.table import RULES
from search_spaces.trial import Workload

IN_NODE = "tensor-in-node"
UNKNOWN_MODEL = CommandModel(arguments=("train.py",), pattern="(?P<step_seconds>.*)")
"""Stands for a model whose shape is unknown: rules about shapes do not apply."""


PROBES = (8, 2, 1, True, False, "full", "selective", "uniform")
"""Values that are tried for a setting whose value is decided when the file runs. The first one is also a size of a model."""


def legality(case: LintCase) -> list[Finding]:
    """Everything that the framework refuses, fails at, ignores or changes, in the order of its table and of our rules.

    Of a file with undecided settings, only what holds for each value that is tried for them.
    """
    findings = _findings(case)
    for changed in _decided(case):
        if not findings:
            break
        rules = {finding.rule for finding in _findings(changed)}
        findings = [finding for finding in findings if finding.rule in rules]
    return findings


def _findings(case: LintCase) -> list[Finding]:
    return [*case.framework.undeclared_findings(case), *_table(case), *_rules(case), *_experts(case)]


def _decided(case: LintCase) -> Iterator[LintCase]:
    """The configuration with values for its undecided settings: for all together, then for each one."""
    values: dict[str, list[Any]] = {}
    alone = []
    for key in case.imported.undecided:
        for value in PROBES:
            with suppress(AutotuneError, SearchSpaceError):
                alone.append(case.changed({key: value}))
                values.setdefault(key, []).append(value)
    for index in range(max(map(len, values.values()), default=0)):
        with suppress(AutotuneError, SearchSpaceError):
            yield case.changed({key: options[index % len(options)] for key, options in values.items()})
    yield from alone


def undecided_settings(case: LintCase) -> dict[str, str]:
    """Undecided setting -> what decides it, of those that memory or speed depend on."""

    def reading(variant: LintCase) -> tuple[object, ...]:
        return variant.imported.knobs, variant.batch, variant.tokens, variant.model

    deciders = {}
    joint = next(_decided(case), case)
    for key, by in case.imported.undecided.items():
        for value in PROBES:
            with suppress(AutotuneError, SearchSpaceError):
                if any(
                    reading(variant.changed({key: value})) != reading(variant.changed({key: None})) for variant in (case, joint)
                ):
                    deciders[key] = by
    return deciders


def without_idle_settings(case: LintCase) -> LintCase:
    """The case without the undecided settings that change no finding: each is tried anew for every variant of a case."""
    rules, deciders = {finding.rule for finding in _findings(case)}, {}
    for key, by in case.imported.undecided.items():
        for value in PROBES:
            with suppress(AutotuneError, SearchSpaceError):
                if {finding.rule for finding in _findings(case.changed({key: value}))} != rules:
                    deciders[key] = by
                    break
    return dataclasses.replace(case, imported=dataclasses.replace(case.imported, undecided=deciders))


def undecided_findings(case: LintCase, certain: Iterable[Finding]) -> list[str]:
    """A note about each finding that an undecided setting would remove, because it may state what is missing.

    `certain`: what `legality` finds.
    """
    by, rules = case.imported.undecided, {finding.rule for finding in certain}
    return [
        f"{finding.key}: {finding.problem}; {by[finding.key]} may set it"
        for finding in (_findings(case) if by else ()) if finding.key in by and finding.rule not in rules
    ]  # fmt: skip


def _table(case: LintCase) -> Iterator[Finding]:
    for check in case.framework.checks:
        if not check.holds(case):
            continue
        problem = check.problem(case) if callable(check.problem) else check.problem
        if problem is not None:
            fix = check.fix(case) if callable(check.fix) else check.fix
            remedy = written(fix) or check.remedy
            yield Finding(rule=check.name, key=check.key, effect=check.effect, problem=problem, remedy=remedy, fix=fix)


def written(fix: object) -> str:
    """A change as a remedy: `set KEY=VALUE`."""
    if not isinstance(fix, dict) or not fix:
        return ""
    parts = [f"leave {key} out" if value is None else f"set {key}={_text(value)}" for key, value in fix.items()]
    return " and ".join(parts)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rules(case: LintCase) -> Iterator[Finding]:
    """Our rules, as far as they hold for the framework and their inputs are known."""
    context = _context(case)
    if context is None:
        return
    for rule in RULES:
        if not _applies(case, rule):
            continue
        if (problem := rule.check(case.config, context)) is not None:
            effect = Effect.SLOW if rule.name == IN_NODE else Effect.FAILS
            yield Finding(rule=rule.name, key=_blamed(case, rule), effect=effect, problem=problem, remedy=rule.remedy)


def _applies(case: LintCase, rule: Rule) -> bool:
    if rule.name == IN_NODE:
        return case.around.cluster is not None
    if rule.name in ("batch-divides", "pipeline-micro-batches") and (case.batch is None or case.replicas is None):
        return False
    if rule.name == "sequence-divides" and case.tokens is None:
        return False
    # In Megatron-LM the embedding and the loss can have a stage of their own.
    if rule.name == "pipeline-layers" and any("in-pipeline-split" in key.replace("_", "-") for key in case.imported.settings):
        return False
    return rule.name in case.framework.rules and (case.ranks is not None or rule.name != "world-divides")


def _blamed(case: LintCase, rule: Rule) -> str:
    """The setting that states the rule's first knob that is not at its default."""
    changed = [name for name in rule.reads if name in case.imported.keys]
    if rule.name == "batch-divides":
        return case.key_of(BATCH)
    return case.key_of((changed or list(rule.reads))[0])


def _context(case: LintCase) -> SpaceContext | None:
    """What rules read; unknown ranks are those of one replica."""
    ranks = case.ranks or case.config.model_parallel_size
    batch = case.framework.samples_per_pass(case) or ranks
    try:
        model = case.framework.as_run(case.model, case.config) if case.model else UNKNOWN_MODEL
    except ModelFormatError:
        model = case.model or UNKNOWN_MODEL
    return SpaceContext(
        model=model,
        cluster=case.around.cluster or _any_cluster(ranks),
        workload=Workload(global_batch_size=batch, sequence_length=case.tokens or ranks * 2),
        world_size=ranks,
    )


def _any_cluster(ranks: int) -> ClusterSpec:
    """A node of all ranks, which no rule about links or devices refuses."""
    return ClusterSpec(
        name="any", nodes=1, devices_per_node=ranks, device=DeviceSpec(name="any", kind="cuda", memory_bytes=1, peak_flops={}),
        intra_node_bandwidth=1, inter_node_bandwidth=1, host_memory_bytes=1, cores_per_node=1,
    )  # fmt: skip


def expert_ranks(case: LintCase) -> int:
    """Consecutive ranks that an expert-parallel group lies in."""
    config = case.config
    inner = case.framework.expert_tensor(case) if case.framework.experts_borrow else config.tensor_parallel_size
    return config.expert_parallel_size * inner


def _experts(case: LintCase) -> Iterator[Finding]:
    """Experts against their ranks."""
    model, size = case.model, case.config.expert_parallel_size
    if size == 1 or (model is not None and not model.num_experts):
        return  # without experts, the framework's own table says what happens
    key, remedy = case.key_of("expert_parallel_size"), "choose a divisor of the experts and of the ranks that hold them"
    problem = None
    if model is not None and model.num_experts % size:
        problem = f"{size} ranks do not divide {model.num_experts} experts of {model.name}"
    elif case.replicas is not None:
        holding = case.replicas * case.config.context_parallel_size * case.config.tensor_parallel_size
        if case.framework.name == "torchtitan" and case.config.hsdp_shard_size:
            holding = case.config.hsdp_shard_size * case.config.tensor_parallel_size
        inner = case.framework.expert_tensor(case)
        if holding % (size * inner):
            inside = f" x {inner} ranks of an expert" if inner > 1 else ""
            problem = f"{size}{inside} does not divide the {holding} ranks of a stage (data x context x tensor)"
    if problem:
        yield Finding(rule="experts-divide", key=key, effect=Effect.FAILS, problem=problem, remedy=remedy)


READS: Mapping[str, tuple[str, ...]] = {
    **{rule.name: rule.reads for rule in RULES},
    "experts-divide": ("expert_parallel_size", "tensor_parallel_size"),
}
"""Rule -> the knobs that a change for it may touch."""


def smallest_change(case: LintCase, finding: Finding) -> Settings:
    """The settings of the nearest configuration without the finding and without new ones; empty: no single knob removes it."""
    rules_before = {problem.rule for problem in legality(case)}
    for changes, changed in single_changes(case, READS.get(finding.rule, ())):
        remaining = {problem.rule for problem in legality(changed)}
        if finding.rule not in remaining and remaining <= rules_before:
            return changes
    return {}


def single_changes(case: LintCase, knobs: Iterable[str]) -> Iterator[tuple[Settings, LintCase]]:
    """Each configuration that differs in one of the knobs, the nearest first."""
    options = [(distance, order, name, value) for order, name in enumerate(_with_batch(knobs))
               for value, distance in _values(case, name)]  # fmt: skip
    for _, _, name, value in sorted(options, key=lambda item: item[:2]):
        changes = case.framework.write(case, name, value)
        if not changes:
            continue
        try:
            changed = case.changed(changes)
        except (AutotuneError, SearchSpaceError):
            continue
        if name == BATCH or getattr(changed.config, name) == value:
            yield changes, changed


def _with_batch(knobs: Iterable[str]) -> list[str]:
    names = list(knobs)
    return [*names, BATCH] if "micro_batch_size" in names else names


def _values(case: LintCase, name: str) -> Iterator[tuple[Value, float]]:
    """Other values of a knob, each with its distance."""
    if name == BATCH:
        yield from _batches(case)
        return
    present, knob = getattr(case.config, name), KNOBS[name]
    # Distance of another word, beside the logarithm of the ratio of two numbers.
    choice_distance = math.log(2)
    if isinstance(present, bool):
        yield not present, choice_distance
    elif knob.choices:
        for index, value in enumerate(knob.choices):
            if value != present:
                yield value, choice_distance * (1 + index / 100)
    elif isinstance(present, int) and not isinstance(present, bool):
        for value in _degrees(present, case):
            yield value, abs(math.log(value / max(present, 1))) or choice_distance


def _degrees(present: int, case: LintCase) -> list[int]:
    largest_degree = 512
    most = min(case.ranks or largest_degree, largest_degree)
    return [
        value
        for value in range(1, min(max(most, present), largest_degree) + 1)
        if value != present and (value <= 16 or value % 2 == 0)
    ]


def _batches(case: LintCase) -> Iterator[tuple[Value, float]]:
    batch = case.batch
    if batch is None or case.replicas is None:
        return
    step = case.config.micro_batch_size * case.replicas
    for multiple in (step, step * case.config.pipeline_parallel_size):  # whole micro-batches, and whole rounds of stages
        for value in (batch // multiple * multiple, -(-batch // multiple) * multiple):
            if value and value != batch:
                yield value, abs(math.log(value / batch))
