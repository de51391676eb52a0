"""Trials and configurations that differ from the winner in one knob."""

from collections.abc import Iterator, Mapping, Sequence

from autotune.explain.explanation.evidence import Evidence
from search_spaces.environment import ENVIRONMENT
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import TrialRecord

FEW = 2
"""Most other knobs in which a trial may differ to be reported at all."""


def explained_knobs(evidence: Evidence) -> list[str]:
    """Knobs that matter in the winner and were searched, or differ from the baseline or the defaults."""
    winner, space, baseline = evidence.config, evidence.session.space, baseline_of(evidence)
    searched = {name for name, values in space.domains.items() if len(values) > 1}
    searched |= {ENVIRONMENT} if evidence.session.request.resolved_environments else set()
    changed = set(winner.differences(TrialConfig())) | (set(winner.differences(baseline)) if baseline else set())
    return [name for name in KNOBS if name in searched | changed and _matters(evidence, name, winner)]


def baseline_of(evidence: Evidence) -> TrialConfig | None:
    """The measured baseline; None: none was measured."""
    return evidence.verdict.baseline.config if evidence.verdict.baseline else None


def values_of(evidence: Evidence, knob: str) -> list[Value]:
    """The values of the domain, the winner, the default and the baseline, in order."""
    baseline = baseline_of(evidence)
    others = [getattr(config, knob) for config in (evidence.config, baseline, TrialConfig()) if config is not None]
    tried = evidence.session.request.resolved_environments if knob == ENVIRONMENT else ()
    values = list(dict.fromkeys([*evidence.session.space.domains.get(knob, ()), *others, *tried]))
    return values if isinstance(values[0], str) else sorted(values, key=float)


def differing_knobs(evidence: Evidence, config: TrialConfig) -> list[str]:
    """Knobs in which a configuration differs from the winner, except those that do not matter in one of the two."""
    winner = evidence.config
    found = [name for name in KNOB_NAMES if getattr(config, name) != getattr(winner, name)]
    return [name for name in found if _matters(evidence, name, winner) and _matters(evidence, name, config)]


def all_differing_knobs(evidence: Evidence) -> Mapping[int, list[str]]:
    """Search trial number -> knobs of `differing_knobs`. Computed once for all knobs, since a job may have many trials."""
    if not evidence.differing_knobs:
        evidence.differing_knobs.update(
            {trial.number: differing_knobs(evidence, trial.config) for trial in evidence.snapshot.searched}
        )
    return evidence.differing_knobs


def neighbours(evidence: Evidence, knob: str, value: Value) -> list[TrialRecord]:
    """Search trials with the value that differ from the winner only in that knob."""
    found = all_differing_knobs(evidence)
    ended = (trial for trial in evidence.snapshot.searched if found[trial.number] == [knob])
    return [trial for trial in ended if getattr(trial.config, knob) == value]


def with_value(evidence: Evidence, knob: str, value: Value) -> TrialConfig | None:
    """The winner with that value; knobs that become relevant take the nearest value of their domain. None: impossible."""
    space = evidence.session.space
    changed = evidence.config.replace({knob: value})
    config = space.admitted(changed) if value in space.domains.get(knob, ()) else space.canonical(changed)
    return config if getattr(config, knob) == value else None


def far_trials(evidence: Evidence, knob: str, trials: Sequence[TrialRecord]) -> Iterator[tuple[TrialRecord, list[str]]]:
    """The trials that have another value and differ in a few other knobs, most similar first, with those knobs."""
    known = all_differing_knobs(evidence)
    found = [(trial, known[trial.number]) for trial in trials]
    near = [(trial, [name for name in names if name != knob]) for trial, names in found if knob in names]
    yield from sorted(((t, others) for t, others in near if 0 < len(others) <= FEW), key=lambda item: len(item[1]))


def _matters(evidence: Evidence, knob: str, config: TrialConfig) -> bool:
    condition = KNOBS[knob].condition
    return condition is None or condition.holds(config, evidence.session.space.context)
