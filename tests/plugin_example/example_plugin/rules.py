"""A rule of the example's knob."""

from search_spaces.capability import Rule, SpaceContext
from search_spaces.trial_config import TrialConfig


def _pauses_with_bucket(config: TrialConfig, _: SpaceContext) -> str | None:
    return "an odd pause" if getattr(config, "step_pause") % 2 else None  # noqa: B009  a type checker does not know the knob


PAUSE_NEEDS_EXAMPLE = Rule("step-pause-even", ("step_pause",), "give an even number of milliseconds", _pauses_with_bucket)
