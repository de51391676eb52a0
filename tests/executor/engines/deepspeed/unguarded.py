"""A trial function of ranks: DeepSpeed is asked for what its engine refuses, to show that it is right to."""

from collections.abc import Callable

from executor.engine import RankContext
from executor.engines.deepspeed import engine
from executor.trial.run import run_trial
from search_spaces.trial import Progress, TrialRequest, TrialResult


def run_unguarded(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    """As `run_trial`, without a refusal."""
    engine.refuse = lambda *_: None
    return run_trial(context, request, progress)
