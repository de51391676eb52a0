"""All findings about one configuration."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.errors import RequestError
from autotune.imports.read import REMEDY, Written, unknown_kind
from autotune.lint.accelerate import ACCELERATE
from autotune.lint.case import Case, Framework, Surroundings
from autotune.lint.changes import smallest_change
from autotune.lint.deepspeed import DEEPSPEED
from autotune.lint.legality import legality, undecided_findings, undecided_settings, undecided_text, written
from autotune.lint.links import beyond_links
from autotune.lint.megatron import MEGATRON, MEGATRON_BRIDGE
from autotune.lint.memory import Outlook, fit, outlook
from autotune.lint.torchtitan import TORCHTITAN
from search_spaces.finding import Effect, Finding

FRAMEWORKS: Mapping[str, Framework] = {one.name: one for one in (DEEPSPEED, TORCHTITAN, MEGATRON, MEGATRON_BRIDGE, ACCELERATE)}
STOPS = (Effect.REFUSED, Effect.FAILS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linted:
    """A configuration with its findings."""

    written: Written
    case: Case
    findings: tuple[Finding, ...]
    outlook: Outlook | str
    """The prediction, or why there is none."""


def case_of(one: Written, around: Surroundings) -> Case:
    """The configuration, read as knobs.

    Raises:
        RequestError: it is of no known format or version, or has an invalid value.
    """
    if not one.format:
        raise RequestError("file", unknown_kind(one), REMEDY)
    framework = FRAMEWORKS[one.format]
    found = framework.read(one.content, str(one.path) if one.format == ACCELERATE.name else one.name)
    variables = {name: file for file in one.sourced for name in framework.variables if name not in found.settings}
    found = dataclasses.replace(found.noted(*one.notes()), undecided={**variables, **one.open})
    return Case(framework=framework, found=found, around=around, source=str(one.path))


def lint(one: Written, around: Surroundings) -> Linted:
    """Check the configuration.

    1. The framework's own table, our rules, and experts: findings without predictions.
    2. For each finding without a fix, the nearest legal configuration without it.
    3. If nothing stops the run: memory and speed by prediction, and expert groups beyond a link domain.

    What is decided when the file runs supports no finding and no prediction.

    Raises:
        RequestError: as `case_of`.
    """
    case = case_of(one, around)
    certain = legality(case)
    found = [_with_fix(case, finding) for finding in certain]
    present: Outlook | str = "not predicted, because the configuration does not run"
    if not any(finding.effect in STOPS for finding in found):
        undecided = undecided_settings(case)
        present = undecided_text(undecided) if undecided else outlook(case)
        found += [] if undecided else beyond_links(case)
        if isinstance(present, Outlook):
            found += fit(case, present)
    case = dataclasses.replace(case, found=case.found.noted(*undecided_findings(case, certain)))
    return Linted(written=one, case=case, findings=tuple(found), outlook=present)


def _with_fix(case: Case, finding: Finding) -> Finding:
    if finding.fix:
        return finding
    if not (changes := smallest_change(case, finding)):
        return finding
    return dataclasses.replace(finding, remedy=written(changes), fix=changes)
