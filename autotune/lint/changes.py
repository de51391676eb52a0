"""The smallest change of a configuration's settings that removes a finding."""

import math
from collections.abc import Iterable, Iterator, Mapping

from autotune.errors import AutotuneError
from autotune.lint.case import LintCase, Settings
from autotune.lint.legality import legality
from search_spaces.errors import SearchSpaceError
from search_spaces.finding import Finding
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.rules.table import RULES

BATCH = "global_batch_size"
LARGEST_DEGREE = 512
READS: Mapping[str, tuple[str, ...]] = {
    **{rule.name: rule.reads for rule in RULES},
    "experts-divide": ("expert_parallel_size", "tensor_parallel_size"),
}
"""Rule -> the knobs that a change for it may touch."""
CHOICE_DISTANCE = math.log(2)
"""Distance of another word, beside the logarithm of the ratio of two numbers."""


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
    if isinstance(present, bool):
        yield not present, CHOICE_DISTANCE
    elif knob.choices:
        for index, value in enumerate(knob.choices):
            if value != present:
                yield value, CHOICE_DISTANCE * (1 + index / 100)
    elif isinstance(present, int) and not isinstance(present, bool):
        for value in _degrees(present, case):
            yield value, abs(math.log(value / max(present, 1))) or CHOICE_DISTANCE


def _degrees(present: int, case: LintCase) -> list[int]:
    most = min(case.ranks or LARGEST_DEGREE, LARGEST_DEGREE)
    return [
        value
        for value in range(1, min(max(most, present), LARGEST_DEGREE) + 1)
        if value != present and (value <= 16 or value % 2 == 0)
    ]


def _batches(case: LintCase) -> Iterator[tuple[Value, float]]:
    batch = case.batch
    if batch is None or case.replicas is None:
        return
    step = case.config.micro_batch_size * case.replicas
    for value in (batch // step * step, -(-batch // step) * step):
        if value and value != batch:
            yield value, abs(math.log(value / batch))
