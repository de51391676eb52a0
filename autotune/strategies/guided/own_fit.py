"""The equations' coefficients, fitted to the first trials of the running job."""

import bisect
from collections.abc import Sequence

import numpy as np

from autotune.objective.ranking import rate
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.fitting.trial_fit import fit_time
from autotune.prediction.fitting.trial_history import Runs
from autotune.strategies.guided.observations import noise_of
from autotune.strategies.guided.setting import Setting
from search_spaces.outcome import Outcome
from storage.records import TrialRecord

MILESTONES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of trials after which coefficients are refitted. In between, residuals are learned candidate by candidate."""
REPEATS = 0.08
"""Standard deviation of the logarithm of a rate between repeated trials, beyond the noise measured within each."""


def milestone(count: int) -> int:
    """The last milestone that this many trials have reached; 0: none."""
    place = bisect.bisect_right(MILESTONES, count)
    return MILESTONES[place - 1] if place else 0


def timed_trials(history: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Trials whose step time was measured."""
    return [trial for trial in history if trial.outcome is Outcome.OK and rate(trial) > 0]


def fitted_to(timed: Sequence[TrialRecord], setting: Setting, before: Coefficients) -> Coefficients:
    """The most probable coefficients given these trials, with `before` as the prior."""
    alike: dict[tuple[str, str], list[TrialRecord]] = {}
    for trial in timed:
        alike.setdefault((trial.config.precision, trial.config.attention_backend), []).append(trial)
    return fit_time([_runs(trials, setting) for trials in alike.values()], before)


def _runs(trials: Sequence[TrialRecord], setting: Setting) -> Runs:
    configs = [trial.config for trial in trials]
    return Runs(
        cases=cases_of(setting.model, setting.cluster, setting.workload, configs, setting.engine), configs=tuple(configs),
        keys=tuple(config.hash for config in configs), peaks=np.full(len(trials), np.nan), repeats=np.ones(len(trials)),
        seconds=np.array([setting.workload.global_batch_size / rate(trial) for trial in trials]),
        noise=np.array([np.hypot(noise_of(trial), REPEATS) for trial in trials]),
    )  # fmt: skip
