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
from autotune.frameworks.framework import BATCH, LintCase, Surroundings
from autotune.frameworks.imported import REMEDY
from autotune.frameworks.read import FRAMEWORKS, Written, unknown_kind
from autotune.prediction.planning.conditional import ConditionalEstimate
from autotune.prediction.planning.consequences import Verdict, verdict_of
from autotune.prediction.planning.estimate import StepEstimate
from autotune.recipes.assumed import assumptions, conditional, origins, require_unstated, with_values
from autotune.recipes.candidates import faster
from autotune.recipes.outlook import GIB, STOPS, outlook
from autotune.recipes.remedies import Variant, fastest, fit
from search_spaces.errors import Effect, Finding
from search_spaces.knob_values import KNOBS
from search_spaces.plain import to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Linted:
    """A configuration with its findings."""

    written: Written
    case: LintCase
    findings: tuple[Finding, ...]
    outlook: StepEstimate | str
    """The prediction, or why there is none."""
    conditional: ConditionalEstimate | None = None
    """The prediction with what it assumes, and what follows from that; None: there is none."""


def case_of(recipe: Written, around: Surroundings) -> LintCase:
    """The configuration, read as knobs.

    Raises:
        RequestError: it is of no known format or version, has an invalid value, or states what the user says of the program.
    """
    if not recipe.format:
        raise RequestError("file", unknown_kind(recipe), REMEDY)
    framework, imported = FRAMEWORKS[recipe.format], recipe.read()
    variables = {name: file for file in recipe.sourced for name in framework.variables if name not in imported.settings}
    imported = dataclasses.replace(imported, undecided={**variables, **recipe.open})
    case = LintCase(framework=framework, imported=imported, around=around, source=str(recipe.path))
    require_unstated(case)
    for name, value in around.knobs.items():  # of a setting that is decided when the script runs
        settings = framework.write(case, name, value)
        if open_settings := {key: settings[key] for key in settings if key in case.imported.undecided}:
            case = case.changed(open_settings)
    remaining = {key: by for key, by in recipe.open.items() if key in case.imported.undecided}
    notes = dataclasses.replace(recipe, open=remaining).notes()
    return dataclasses.replace(case, imported=case.imported.noted(*notes))


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
    # Variants are judged by what is decided: nothing that is predicted depends on the rest.
    decided = dataclasses.replace(case, imported=dataclasses.replace(case.imported, undecided={}))
    hanging = _hanging(decided, certain)
    findings = [_with_fix(decided, finding) for finding in certain if finding.rule not in hanging]
    present: StepEstimate | str = "not predicted, because the configuration does not run"
    answer = None
    if not any(finding.effect in STOPS for finding in findings):
        if undecided := undecided_settings(case):
            names = ", ".join(f"{key} ({by})" for key, by in undecided.items())
            options = "--set NAME=VALUE, --assume KNOB=VALUE, --model, --global-batch-size or --sequence-length"
            present = f"not predicted: the script decides {names} when it runs; give {options}"
        else:
            present = outlook(case)
            findings += beyond_links(decided)
        if isinstance(present, StepEstimate):
            answer = conditional(decided, present)
            findings += fit(decided, answer)
            if not findings and (advice := faster(decided, present)):
                case = dataclasses.replace(case, imported=case.imported.noted(advice))
    notes = list(undecided_findings(case, certain))
    notes += [f"{finding.key}: {finding.problem}; not with {hanging[finding.rule]}" for finding in certain
              if finding.rule in hanging]  # fmt: skip
    if case.imported.ranks not in (None, case.ranks):
        notes.append(f"the file states {case.imported.ranks} as the number of ranks: checked on {case.ranks}, as you state")
    case = dataclasses.replace(case, imported=case.imported.noted(*notes))
    return Linted(written=recipe, case=case, findings=tuple(findings), outlook=present, conditional=answer)


def _hanging(case: LintCase, findings: Sequence[Finding]) -> dict[str, str]:
    """Rule of a finding that hangs on an assumed knob -> the plausible value at which it is not there."""
    hanging: dict[str, str] = {}
    for item in assumptions(case) if findings else ():
        for value in item.alternatives if item.name in KNOBS else ():
            remaining = {finding.rule for finding in legality(with_values(case, {item.name: value}))}
            hanging = {finding.rule: item.words(value) for finding in findings if finding.rule not in remaining} | hanging
    return hanging


def _with_fix(case: LintCase, finding: Finding) -> Finding:
    if finding.fix:
        return finding
    if not (changes := smallest_change(case, finding)):
        return finding
    return dataclasses.replace(finding, remedy=written(changes), fix=changes)


RULE = "experts-beyond-links"


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


def _faster(case: LintCase, key: str, problem: str, inside: Sequence[Variant]) -> Iterator[Finding]:
    present, best = outlook(case), fastest(case, inside)
    if isinstance(present, str) or best is None:
        return
    ratio = best.estimate.samples_per_second.mean / present.samples_per_second.mean
    # Least predicted ratio of rates from which a slower exchange of tokens is a finding: less is within the predictions' error.
    if ratio >= 1.1:
        slower = f"{problem}; groups within one are predicted {ratio:.2f} times as fast"
        yield Finding(
            rule=RULE, key=key, effect=Effect.SLOW, problem=slower, remedy=written(best.changes), fix=best.changes
        )  # fmt: skip


LEVELS = {
    Effect.REFUSED: "error", Effect.FAILS: "error", Effect.DOES_NOT_FIT: "error", Effect.IGNORED: "warning",
    Effect.CHANGED: "warning", Effect.SLOW: "warning", Effect.MAY_NOT_FIT: "note",
}  # fmt: skip
"""Effect -> level of a SARIF result."""


def line_of(recipe: Written, key: str) -> int:
    """The line of the file that states a setting; where none does, the first line that could."""
    try:
        lines = recipe.path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return 1
    first = recipe.lines.get("recipe", 1)
    name = key.rsplit(".", 1)[-1]
    spelled = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return next((number for number, line in enumerate(lines, 1) if number >= first and spelled.search(line)), first)


def text_lines(linted: Linted, version: str) -> list[str]:
    """One line for each finding, or one if nothing was found, one for each note, one for the prediction, and one for each value
    that it assumes."""
    path, title = linted.written.path, linted.case.framework.title
    location = path if linted.written.name == path.name else f"{path}:{linted.written.name.partition(':')[2]}"
    lines = [f"{path}:{line_of(linted.written, finding.key)}: {finding}" for finding in linted.findings]
    if not lines:
        lines = [f"{location}: nothing that {title} {version} would refuse, ignore or change"]
    reported_keys = {finding.key for finding in linted.findings}
    other_notes = [note for note in linted.case.imported.notes if note.partition("=")[0] not in reported_keys]
    notes = [f"{location}: note: {note}" for note in grouped(other_notes)]
    assumed = [f"{location}: {line}" for line in assumed_lines(linted.conditional)]
    return [*lines, *notes, f"{location}: {outlook_text(linted.conditional or linted.outlook)}", *assumed]


def assumed_lines(answer: ConditionalEstimate | None) -> list[str]:
    """A line for each value that a prediction assumes, most consequential first."""
    return [] if answer is None else [f"assumed: {line.strip()}" for line in answer.conditions.lines()[1:]]


def grouped(notes: Iterable[str]) -> list[str]:
    """The notes, with those of one reason in one line: `KEY=VALUE, KEY=VALUE: REASON`."""
    subjects: dict[str, list[str]] = {}
    for note in notes:
        subject, _, reason = note.rpartition(": ")
        subjects.setdefault(reason, []).append(subject)
    return [": ".join(filter(None, (", ".join(filter(None, texts)), reason))) for reason, texts in subjects.items()]


def outlook_text(answer: ConditionalEstimate | StepEstimate | str) -> str:
    """The prediction in one line, with the values on which the verdict hangs."""
    if isinstance(answer, str):
        return answer
    outlook, condition = (answer, "") if isinstance(answer, StepEstimate) else (answer.estimate, answer.condition)
    rate, needed = outlook.samples_per_second, outlook.fullest.needed
    return (
        f"predicted {rate.mean:.3g} samples/s ({rate.low:.3g} to {rate.high:.3g}), needs {needed / GIB:.0f} of "
        f"{outlook.memory_limit_bytes / GIB:.0f} GiB on the fullest device, "
        f"fits with probability {outlook.fit_probability:.2f}"
        + (" (it may not fit)" if verdict_of(outlook) is Verdict.MAY_FIT else "")
        + (f" {condition}" if condition else "")
    )


def checked_version(linted: Linted, requested_version: str = "") -> str:
    """The framework's version of the findings; `requested_version` is the user's, which only DeepSpeed's may be."""
    framework = linted.case.framework
    return version_of(requested_version) if framework.name == "deepspeed" else framework.checked


def document(linted: Linted, version: str) -> dict[str, Any]:
    """The document of `--json` for one configuration."""
    model, outlook = linted.case.model, linted.outlook
    imported, path = linted.case.imported, linted.written.path
    named = (*imported.knobs, BATCH, "model", "sequence_length")
    keys = {linted.case.key_of(name) for name in named} & imported.settings.keys()
    places = {key: f"{path}:{line_of(linted.written, key)} {key}" for key in keys}
    return {
        "file": str(linted.written.path),
        "recipe": linted.written.name,
        "format": linted.written.format,
        "version": version,
        "model": model.name if model else None,
        "ranks": linted.case.ranks,
        "knobs": dict(imported.knobs),
        "global_batch_size": linted.case.batch,
        "sequence_length": linted.case.tokens,
        "findings": [{**to_plain(finding), "line": line_of(linted.written, finding.key)} for finding in linted.findings],
        "notes": list(imported.notes),
        "assumed": linted.conditional.conditions.document() if linted.conditional else [],
        "origins": {name: to_plain(origin) for name, origin in origins(linted.case, places, version).items()},
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
    notifications: list[dict[str, Any]] = [{"level": "error", "message": {"text": line}} for line in unread]
    notifications += [
        {"level": "note", "message": {"text": line}, "locations": [_location(configuration, 1)]}
        for configuration in linted
        for line in assumed_lines(configuration.conditional)
    ]
    invocation = {"executionSuccessful": not unread, "toolExecutionNotifications": notifications}
    return {
        "$schema": "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "invocations": [invocation], "results": results}],
    }


def _result(linted: Linted, finding: Finding, rule_index: int) -> dict[str, Any]:
    return {
        "ruleId": f"{linted.written.format}/{finding.rule}",
        "ruleIndex": rule_index,
        "level": LEVELS[finding.effect],
        "message": {"text": str(finding)},
        "locations": [_location(linted, line_of(linted.written, finding.key))],
        "properties": {"key": finding.key, "effect": finding.effect.value, "fix": to_plain(finding.fix)},
    }


def _location(linted: Linted, line: int) -> dict[str, Any]:
    artifact = {"uri": linted.written.path.as_posix()}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}
