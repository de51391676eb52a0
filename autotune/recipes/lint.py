"""All findings about one configuration; as text, as JSON and as SARIF 2.1.0 [OASIS 2020]."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.check import (
    expert_ranks,
    legality,
    single_changes,
    smallest_change,
    undecided_findings,
    undecided_settings,
    written,
)
from autotune.frameworks.deepspeed_checks import version_of
from autotune.frameworks.framework import LintCase, Surroundings
from autotune.frameworks.imported import REMEDY
from autotune.frameworks.read import FRAMEWORKS, Written, unknown_kind
from autotune.prediction.planning.estimate import StepEstimate
from autotune.recipes.outlook import GIB, UNLIKELY, assumptions, fit, fits, outlook, outlooks
from search_spaces.finding import Effect, Finding
from search_spaces.plain import to_plain

STOPS = (Effect.REFUSED, Effect.FAILS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linted:
    """A configuration with its findings."""

    written: Written
    case: LintCase
    findings: tuple[Finding, ...]
    outlook: StepEstimate | str
    """The prediction, or why there is none."""


def case_of(recipe: Written, around: Surroundings) -> LintCase:
    """The configuration, read as knobs.

    Raises:
        RequestError: it is of no known format or version, or has an invalid value.
    """
    if not recipe.format:
        raise RequestError("file", unknown_kind(recipe), REMEDY)
    framework, imported = FRAMEWORKS[recipe.format], recipe.read()
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
    present: StepEstimate | str = "not predicted, because the configuration does not run"
    if not any(finding.effect in STOPS for finding in findings):
        if undecided := undecided_settings(case):
            names = ", ".join(f"{key} ({by})" for key, by in undecided.items())
            options = "--model, --global-batch-size and --sequence-length state theirs"
            present = f"not predicted: the script decides {names} when it runs; write the values into it ({options})"
        else:
            present = outlook(case)
            findings += beyond_links(case)
        if isinstance(present, StepEstimate):
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
    if not isinstance(present, StepEstimate) or not inside:
        return
    predictions = outlooks(case, [changed for _, changed in inside])
    fitting = [
        (prediction.samples_per_second.mean, changes)
        for prediction, (changes, _) in zip(predictions, inside, strict=True)
        if prediction is not None and fits(prediction)
    ]
    if not fitting:
        return
    rate, changes = max(fitting, key=lambda item: item[0])
    ratio = rate / present.samples_per_second.mean
    if ratio >= GAIN:
        assert isinstance(changes, dict)
        slower = f"{problem}; groups within one are predicted {ratio:.2f} times as fast"
        yield Finding(rule=RULE, key=key, effect=Effect.SLOW, problem=slower, remedy=written(changes), fix=changes)


SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {
    Effect.REFUSED: "error", Effect.FAILS: "error", Effect.DOES_NOT_FIT: "error", Effect.IGNORED: "warning",
    Effect.CHANGED: "warning", Effect.SLOW: "warning", Effect.MAY_NOT_FIT: "note",
}  # fmt: skip
"""Effect -> level of a SARIF result."""


def line_of(linted: Linted, key: str) -> int:
    """The line of the file that states a setting; where none does, the first line that could."""
    try:
        lines = linted.written.path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return 1
    first = linted.written.lines.get("recipe", 1)
    name = key.rsplit(".", 1)[-1]
    spelled = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return next((number for number, line in enumerate(lines, 1) if number >= first and spelled.search(line)), first)


def text_lines(linted: Linted, version: str) -> list[str]:
    """One line for each finding, or one if nothing was found, one for each note, and one for the prediction."""
    path, title = linted.written.path, linted.case.framework.title
    location = path if linted.written.name == path.name else f"{path}:{linted.written.name.partition(':')[2]}"
    lines = [f"{path}:{line_of(linted, finding.key)}: {finding}" for finding in linted.findings]
    if not lines:
        lines = [f"{location}: nothing that {title} {version} would refuse, ignore or change"]
    reported_keys = {finding.key for finding in linted.findings}
    other_notes = [note for note in linted.case.imported.notes if note.partition("=")[0] not in reported_keys]
    notes = [f"{location}: note: {note}" for note in grouped(other_notes)]
    return [*lines, *notes, f"{location}: {outlook_text(linted.outlook, linted.case)}"]


def notes_of(case: LintCase) -> list[str]:
    """Everything that was not read as the file states it, and what predictions take instead."""
    return [*case.imported.notes, *(f"{line}: taken, because it is not stated" for line in assumptions(case))]


def grouped(notes: Iterable[str]) -> list[str]:
    """The notes, with those of one reason in one line: `KEY=VALUE, KEY=VALUE: REASON`."""
    subjects: dict[str, list[str]] = {}
    for note in notes:
        subject, _, reason = note.rpartition(": ")
        subjects.setdefault(reason, []).append(subject)
    return [": ".join(filter(None, (", ".join(filter(None, texts)), reason))) for reason, texts in subjects.items()]


def outlook_text(outlook: StepEstimate | str, case: LintCase | None = None) -> str:
    """The prediction in one line, with what it takes of the case that nothing states."""
    if isinstance(outlook, str):
        return outlook
    assumed = assumptions(case) if case is not None else []
    rate, peak = outlook.samples_per_second, outlook.peak_memory_bytes
    return (
        f"predicted {rate.mean:.3g} samples/s ({rate.low:.3g} to {rate.high:.3g}), {peak.mean / GIB:.0f} of "
        f"{outlook.memory_limit_bytes / GIB:.0f} GiB on the fullest device, "
        f"fits with probability {outlook.fit_probability:.2f}"
        + (" (it may not fit)" if outlook.fit_probability >= UNLIKELY and not fits(outlook) else "")
        + (f"; taken, because it is not stated: {', '.join(assumed)}" if assumed else "")
    )


def checked_version(linted: Linted, requested_version: str = "") -> str:
    """The framework's version of the findings; `requested_version` is the user's, which only DeepSpeed's may be."""
    framework = linted.case.framework
    return version_of(requested_version) if framework.name == "deepspeed" else framework.checked


def document(linted: Linted, version: str) -> dict[str, Any]:
    """The document of `--json` for one configuration."""
    model, outlook = linted.case.model, linted.outlook
    return {
        "file": str(linted.written.path),
        "recipe": linted.written.name,
        "format": linted.written.format,
        "version": version,
        "model": model.name if model else None,
        "ranks": linted.case.ranks,
        "knobs": dict(linted.case.imported.knobs),
        "global_batch_size": linted.case.batch,
        "sequence_length": linted.case.tokens,
        "findings": [{**to_plain(finding), "line": line_of(linted, finding.key)} for finding in linted.findings],
        "notes": notes_of(linted.case),
        "predicted": None if isinstance(outlook, str) else outlook.document(every_rank=False)["predicted"],
        "not_predicted": outlook if isinstance(outlook, str) else None,
    }


def sarif(linted: Sequence[Linted], unread: Sequence[str]) -> dict[str, Any]:
    """A SARIF log of all configurations; `unread`: a line about each file that could not be read."""
    rules = sorted(
        {(configuration.written.format, finding.rule) for configuration in linted for finding in configuration.findings}
    )
    rule_indices = {rule: index for index, rule in enumerate(rules)}
    driver = {
        "name": "autotune lint",
        "rules": [
            {"id": f"{framework}/{rule}", "shortDescription": {"text": rule.replace("-", " ")}} for framework, rule in rules
        ],
    }
    results = [
        _result(configuration, finding, rule_indices[configuration.written.format, finding.rule])
        for configuration in linted
        for finding in configuration.findings
    ]
    notifications = [{"level": "error", "message": {"text": line}} for line in unread]
    invocation = {"executionSuccessful": not unread, "toolExecutionNotifications": notifications}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "invocations": [invocation], "results": results}],
    }


def _result(linted: Linted, finding: Finding, rule_index: int) -> dict[str, Any]:
    location = {
        "artifactLocation": {"uri": linted.written.path.as_posix()},
        "region": {"startLine": line_of(linted, finding.key)},
    }
    return {
        "ruleId": f"{linted.written.format}/{finding.rule}",
        "ruleIndex": rule_index,
        "level": LEVELS[finding.effect],
        "message": {"text": str(finding)},
        "locations": [{"physicalLocation": location}],
        "properties": {"key": finding.key, "effect": finding.effect.value, "fix": to_plain(finding.fix)},
    }
