"""The second stage: knobs that only split communication and the loss, tuned around the best configuration."""

from collections.abc import Mapping, Sequence

from autotune.prediction.planning.scan import NOT_SCANNED
from search_spaces.knob_values import KNOBS
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

LEAST_SHARE = 0.01
"""Share of the step that a knob must act on: no move can gain more."""


def moves(space: SearchSpace, best: TrialConfig, parts: Mapping[str, float], measured: float) -> Sequence[TrialConfig]:
    """Legal configurations one move away from the best, for knobs that act on a relevant part of the step.

    The time a knob acts on is bounded by measurement: its predicted parts plus all that the prediction does not explain.

    Args:
        space: the space to choose from.
        best: the best so far.
        parts: predicted seconds of a step by part.
        measured: seconds of a step.
    """
    unexplained = max(measured - sum(parts.values()), 0.0)
    found: dict[TrialConfig, None] = {}
    for knob in (name for name in space.domains if name in NOT_SCANNED):
        acted_on = sum(parts.get(part, 0.0) for part in KNOBS[knob].acts_on) + unexplained
        if acted_on < LEAST_SHARE * measured:
            continue
        for value in space.domains[knob]:
            moved = space.admitted(best.replace({knob: value}))
            if moved != best and not space.check(moved):
                found[moved] = None
    return list(found)
