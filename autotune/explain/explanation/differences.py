"""Which knobs differ between two configurations, and the predicted effect of each."""

from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.question import Question
from autotune.wire.figures import KnobDifference, KnobEffect
from search_spaces.knob import Value
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig


def knob_differences(
    space: SearchSpace, question: Question | None, config: TrialConfig, other: TrialConfig
) -> tuple[KnobEffect | None, tuple[KnobDifference, ...]]:
    """The predicted effect of all differences together, and the knobs in which `other` differs from `config`, those with the
    largest effect first.

    The effect of a knob depends on the other knobs. Therefore it is predicted twice: as the first knob to change,
    from `config`, and as the last, to `other`.

    Args:
        space: whose rules say which changes are possible.
        question: what predictions are made for. None: the equations do not know the model, and no effect is predicted.
        config: the configuration before the change.
        other: the configuration after it.
    """
    changed = other.differences(config)
    first = {name: _changed(space, config, name, value) for name, value in changed.items()}
    last = {name: _changed(space, other, name, getattr(config, name)) for name in changed}
    predictions: dict[TrialConfig, StepEstimate] = {}
    if question is not None:
        configs = [
            *dict.fromkeys(candidate for candidate in (config, other, *first.values(), *last.values()) if candidate is not None)
        ]
        predictions = dict(zip(configs, estimates(question, configs), strict=True))

    def effect(before: TrialConfig | None, after: TrialConfig | None) -> KnobEffect | None:
        if before not in predictions or after not in predictions:
            return None
        return KnobEffect(
            speed=predictions[before].step_seconds.mean / predictions[after].step_seconds.mean,
            peak_memory=predictions[after].peak_memory_bytes.mean / predictions[before].peak_memory_bytes.mean,
        )

    differences = [
        KnobDifference(
            knob=name,
            before=getattr(config, name),
            after=value,
            first=effect(config, first[name]),
            last=effect(last[name], other),
        )
        for name, value in changed.items()
    ]
    return effect(config, other), tuple(sorted(differences, key=_size, reverse=True))


def _changed(space: SearchSpace, config: TrialConfig, knob: str, value: Value) -> TrialConfig | None:
    """The configuration with only this knob changed. None: the rules refuse it, or other knobs have to change too."""
    changed = config.replace({knob: value})
    return changed if space.canonical(changed) == changed and not space.check(changed) else None


def _size(difference: KnobDifference) -> float:
    effects = (difference.first, difference.last)
    return max((abs(effect.speed - 1) for effect in effects if effect is not None), default=0.0)
