"""Findings as text, as JSON and as SARIF 2.1.0 [OASIS 2020]."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from autotune.lint.case import LintCase
from autotune.lint.deepspeed import version_of
from autotune.lint.lint import Linted
from autotune.lint.memory import GIB, UNLIKELY, LintPrediction, assumptions
from search_spaces.finding import Effect, Finding
from search_spaces.plain import to_plain

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


def outlook_text(outlook: LintPrediction | str, case: LintCase | None = None) -> str:
    """The prediction in one line, with what it takes of the case that nothing states."""
    if isinstance(outlook, str):
        return outlook
    assumed = assumptions(case) if case is not None else []
    estimate = outlook.estimate
    rate, peak = estimate.samples_per_second, estimate.peak_memory_bytes
    return (
        f"predicted {rate.mean:.3g} samples/s ({rate.low:.3g} to {rate.high:.3g}), {peak.mean / GIB:.0f} of "
        f"{estimate.memory_limit_bytes / GIB:.0f} GiB on the fullest device, fits with probability {outlook.probability:.2f}"
        + (" (it may not fit)" if outlook.probability >= UNLIKELY and not outlook.fits else "")
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
        "predicted": None if isinstance(outlook, str) else outlook.estimate.document(every_rank=False)["predicted"],
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
