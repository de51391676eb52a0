"""Which knobs differ between two configurations, and the predicted effect of each."""

from autotune.prediction.planning.estimate import Estimate, estimates
from autotune.prediction.planning.question import Question
from autotune.wire.figures import KnobDifference, KnobEffect
from search_spaces.knob import Value
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig


def knob_differences(
    space: SearchSpace, question: Question | None, one: TrialConfig, other: TrialConfig
) -> tuple[KnobEffect | None, tuple[KnobDifference, ...]]:
    """The predicted effect of all differences together, and the knobs in which `other` differs from `one`, those with the
    largest effect first.

    The effect of a knob depends on the other knobs. Therefore it is predicted twice: as the first knob to change, from `one`,
    and as the last, to `other`.

    Args:
        space: whose rules say which changes are possible.
        question: what predictions are made for. None: the equations do not know the model, and no effect is predicted.
        one: the configuration before the change.
        other: the configuration after it.
    """
    changed = other.differences(one)
    first = {name: _changed(space, one, name, value) for name, value in changed.items()}
    last = {name: _changed(space, other, name, getattr(one, name)) for name in changed}
    found = {} if question is None else _estimates(question, one, other, *first.values(), *last.values())

    def effect(before: TrialConfig | None, after: TrialConfig | None) -> KnobEffect | None:
        if before not in found or after not in found:
            return None
        return KnobEffect(
            speed=found[before].step_seconds.mean / found[after].step_seconds.mean,
            peak_memory=found[after].peak_memory_bytes.mean / found[before].peak_memory_bytes.mean,
        )

    differences = [
        KnobDifference(
            knob=name, before=getattr(one, name), after=value, first=effect(one, first[name]), last=effect(last[name], other)
        )
        for name, value in changed.items()
    ]
    return effect(one, other), tuple(sorted(differences, key=_size, reverse=True))


def _changed(space: SearchSpace, config: TrialConfig, knob: str, value: Value) -> TrialConfig | None:
    """The configuration with only this knob changed. None: the rules refuse it, or other knobs have to change too."""
    changed = config.replace({knob: value})
    return changed if space.canonical(changed) == changed and not space.check(changed) else None


def _estimates(question: Question, *configs: TrialConfig | None) -> dict[TrialConfig, Estimate]:
    wanted = [*dict.fromkeys(config for config in configs if config is not None)]
    return dict(zip(wanted, estimates(question, wanted), strict=True))


def _size(difference: KnobDifference) -> float:
    effects = (difference.first, difference.last)
    return max((abs(effect.speed - 1) for effect in effects if effect is not None), default=0.0)
