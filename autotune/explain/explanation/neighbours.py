"""Which trials and configurations differ from the winner in one knob alone."""

from collections.abc import Iterator, Mapping, Sequence

from autotune.explain.explanation.evidence import Evidence
from search_spaces.environment import ENVIRONMENT
from search_spaces.knobs import KNOBS
from search_spaces.trial_config import KNOB_NAMES, TrialConfig, Value
from storage.records import TrialRecord

FEW = 2
"""Other knobs in which a trial may differ to be told of at all."""


def explained_knobs(evidence: Evidence) -> list[str]:
    """Knobs that matter in the winner and that were searched, or stand elsewhere than the baseline or the defaults."""
    winner, space, baseline = evidence.config, evidence.session.space, baseline_of(evidence)
    searched = {name for name, values in space.domains.items() if len(values) > 1}
    searched |= {ENVIRONMENT} if evidence.session.request.resolved_environments else set()
    moved = set(winner.differences(TrialConfig())) | (set(winner.differences(baseline)) if baseline else set())
    return [name for name in KNOBS if name in searched | moved and _matters(evidence, name, winner)]


def baseline_of(evidence: Evidence) -> TrialConfig | None:
    """The baseline that was measured."""
    return evidence.verdict.baseline.config if evidence.verdict.baseline else None


def values_of(evidence: Evidence, knob: str) -> list[Value]:
    """The domain, the winner's value, the default and the baseline's, in order."""
    baseline = baseline_of(evidence)
    others = [getattr(config, knob) for config in (evidence.config, baseline, TrialConfig()) if config is not None]
    tried = evidence.session.request.resolved_environments if knob == ENVIRONMENT else ()
    values = list(dict.fromkeys([*evidence.session.space.domains.get(knob, ()), *others, *tried]))
    return values if isinstance(values[0], str) else sorted(values, key=float)


def apart(evidence: Evidence, config: TrialConfig) -> list[str]:
    """Knobs in which a configuration differs from the winner, but for those that do not matter in one of the two."""
    winner = evidence.config
    found = [name for name in KNOB_NAMES if getattr(config, name) != getattr(winner, name)]
    return [name for name in found if _matters(evidence, name, winner) and _matters(evidence, name, config)]


def all_apart(evidence: Evidence) -> Mapping[int, list[str]]:
    """Of every search trial by number: the knobs of `apart`. Found out once for all knobs, since a job may have many trials."""
    if not evidence.apart:
        evidence.apart.update({trial.number: apart(evidence, trial.config) for trial in evidence.book.searched})
    return evidence.apart


def neighbours(evidence: Evidence, knob: str, value: Value) -> list[TrialRecord]:
    """Search trials with the value that differ from the winner in that knob alone."""
    found = all_apart(evidence)
    ended = (trial for trial in evidence.book.searched if found[trial.number] == [knob])
    return [trial for trial in ended if getattr(trial.config, knob) == value]


def moved(evidence: Evidence, knob: str, value: Value) -> TrialConfig | None:
    """The winner with that value, knobs that come to matter by it at the nearest of their domains; None: it cannot have it."""
    space = evidence.session.space
    changed = evidence.config.replace({knob: value})
    config = space.admitted(changed) if value in space.domains.get(knob, ()) else space.canonical(changed)
    return config if getattr(config, knob) == value else None


def far_trials(evidence: Evidence, knob: str, trials: Sequence[TrialRecord]) -> Iterator[tuple[TrialRecord, list[str]]]:
    """The trials that have another value and differ in a few other knobs, nearest first, with those knobs."""
    known = all_apart(evidence)
    found = [(trial, known[trial.number]) for trial in trials]
    near = [(trial, [name for name in names if name != knob]) for trial, names in found if knob in names]
    yield from sorted(((t, others) for t, others in near if 0 < len(others) <= FEW), key=lambda item: len(item[1]))


def _matters(evidence: Evidence, knob: str, config: TrialConfig) -> bool:
    condition = KNOBS[knob].condition
    return condition is None or condition.holds(config, evidence.session.space.context)
