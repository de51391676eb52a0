"""All findings about one configuration, those about groups that lie in several link domains included."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.errors import RequestError
from autotune.imports.read import REMEDY, Written, unknown_kind
from autotune.lint.accelerate import ACCELERATE
from autotune.lint.case import Framework, LintCase, Surroundings
from autotune.lint.changes import single_changes, smallest_change
from autotune.lint.deepspeed import DEEPSPEED
from autotune.lint.legality import expert_ranks, legality, undecided_findings, undecided_settings, undecided_text, written
from autotune.lint.megatron import MEGATRON, MEGATRON_BRIDGE
from autotune.lint.memory import LintPrediction, fit, outlook, outlooks
from autotune.lint.torchtitan import TORCHTITAN
from search_spaces.finding import Effect, Finding

FRAMEWORKS: Mapping[str, Framework] = {one.name: one for one in (DEEPSPEED, TORCHTITAN, MEGATRON, MEGATRON_BRIDGE, ACCELERATE)}
STOPS = (Effect.REFUSED, Effect.FAILS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linted:
    """A configuration with its findings."""

    written: Written
    case: LintCase
    findings: tuple[Finding, ...]
    outlook: LintPrediction | str
    """The prediction, or why there is none."""


def case_of(recipe: Written, around: Surroundings) -> LintCase:
    """The configuration, read as knobs.

    Raises:
        RequestError: it is of no known format or version, or has an invalid value.
    """
    if not recipe.format:
        raise RequestError("file", unknown_kind(recipe), REMEDY)
    framework = FRAMEWORKS[recipe.format]
    imported = framework.read(recipe.content, str(recipe.path) if recipe.format == ACCELERATE.name else recipe.name)
    variables = {name: file for file in recipe.sourced for name in framework.variables if name not in imported.settings}
    imported = dataclasses.replace(imported.noted(*recipe.notes()), undecided={**variables, **recipe.open})
    return LintCase(framework=framework, imported=imported, around=around, source=str(recipe.path))


def lint(recipe: Written, around: Surroundings) -> Linted:
    """Check the configuration.

    1. The framework's own table, our rules, and experts: findings without predictions.
    2. For each finding without a fix, the nearest legal configuration without it.
    3. If nothing stops the run: memory and speed by prediction, and expert groups beyond a link domain.

    What is decided when the file runs supports no finding and no prediction.

    Raises:
        RequestError: as `case_of`.
    """
    case = case_of(recipe, around)
    certain = legality(case)
    findings = [_with_fix(case, finding) for finding in certain]
    present: LintPrediction | str = "not predicted, because the configuration does not run"
    if not any(finding.effect in STOPS for finding in findings):
        undecided = undecided_settings(case)
        present = undecided_text(undecided) if undecided else outlook(case)
        findings += [] if undecided else beyond_links(case)
        if isinstance(present, LintPrediction):
            findings += fit(case, present)
    case = dataclasses.replace(case, imported=case.imported.noted(*undecided_findings(case, certain)))
    return Linted(written=recipe, case=case, findings=tuple(findings), outlook=present)


def _with_fix(case: LintCase, finding: Finding) -> Finding:
    if finding.fix:
        return finding
    if not (changes := smallest_change(case, finding)):
        return finding
    return dataclasses.replace(finding, remedy=written(changes), fix=changes)


RULE = "experts-beyond-links"
GAIN = 1.1
"""Least predicted ratio of rates from which a slower exchange of tokens is a finding: less is within the predictions' error."""


def linked_devices(case: LintCase) -> int | None:
    """Devices that the fast link joins: the cluster's, else what the file states to Megatron's exchange; None: unknown."""
    cluster = case.around.cluster
    if cluster is not None:
        return cluster.linked_devices
    stated_counts = (case.get(f"{table}.NVLINK_DOMAIN_SIZE") for table in ("env_vars", "env"))
    return next((int(value) for value in stated_counts if isinstance(value, int) and value > 0), None)


def beyond_links(case: LintCase) -> Iterator[Finding]:
    """Expert groups beyond a link domain: if the framework's exchange fails there, or a smaller group is faster."""
    linked, ranks = linked_devices(case), expert_ranks(case)
    without = case.model is not None and not case.model.num_experts
    if linked is None or case.config.expert_parallel_size == 1 or without or ranks <= linked:
        return
    why = case.framework.spans_domains(case)
    rules_before = {finding.rule for finding in legality(case)}
    inside = [
        (changes, changed)
        for changes, changed in single_changes(case, ("expert_parallel_size",))
        if expert_ranks(changed) <= linked and {finding.rule for finding in legality(changed)} <= rules_before
    ]
    problem = f"groups of {ranks} ranks lie in several link domains of {linked} devices"
    key = case.key_of("expert_parallel_size")
    if why is not None:
        fix = inside[0][0] if inside else {}
        remedy = written(fix) or f"choose groups of at most {linked} ranks"
        yield Finding(rule=RULE, key=key, effect=Effect.FAILS, problem=f"{why}, and {problem}", remedy=remedy, fix=fix)
        return
    yield from _faster(case, key, problem, inside)


def _faster(case: LintCase, key: str, problem: str, inside: Sequence[tuple[object, LintCase]]) -> Iterator[Finding]:
    present = outlook(case)
    if not isinstance(present, LintPrediction) or not inside:
        return
    predictions = outlooks(case, [changed for _, changed in inside])
    fitting = [
        (prediction.rate, changes)
        for prediction, (changes, _) in zip(predictions, inside, strict=True)
        if prediction is not None and prediction.fits
    ]
    if not fitting:
        return
    rate, changes = max(fitting, key=lambda item: item[0])
    ratio = rate / present.rate
    if ratio >= GAIN:
        assert isinstance(changes, dict)
        slower = f"{problem}; groups within one are predicted {ratio:.2f} times as fast"
        yield Finding(rule=RULE, key=key, effect=Effect.SLOW, problem=slower, remedy=written(changes), fix=changes)
