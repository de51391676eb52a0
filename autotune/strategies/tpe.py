"""Optuna's tree-structured Parzen estimator as an adviser without a memory of its own."""

import math
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.strategies.random import RandomStrategy
from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig, Value, stable_hash
from storage.records import TrialRecord

STARTUP_TRIALS = 8
"""Trials that `random` chooses before there is something to learn from."""
ASKS = 3
"""Times that the adviser is asked before something near its last answer is taken: an ask costs milliseconds, a space ends."""
UNTOLD = (Outcome.CANCELLED, Outcome.LOST, Outcome.PREEMPTED)
"""Outcomes that say nothing of the configuration."""


class TpeStrategy(Strategy):
    """Rebuilds an in-memory study from the rows at each call, asks it, and forgets it.

    1. The first `STARTUP_TRIALS` come from `random`.
    2. Trials that can win are told with the score, all others as constraint violations; pending ones are
       running trials (constant liar).
    3. A proposal that is known or illegal is told as failed, and the study is asked again. After `ASKS` times an unknown
       neighbour of the last answer is taken, and where there is none `random` answers.

    Numbers are told by their place in the knob's domain, because sizes are spread over orders of magnitude.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._random = RandomStrategy()

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        chosen: list[TrialConfig] = []
        while len(chosen) < count:
            config = self._next(candidates, history, [*pending, *chosen], seed)
            if config is None:
                break
            chosen.append(config)
        return chosen

    def _next(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], seed: int
    ) -> TrialConfig | None:
        tried = sum(trial.attempts > 0 for trial in history) + len(pending)
        if tried >= STARTUP_TRIALS:
            config = self._asked(candidates, history, pending, seed)
            if config is not None:
                return config
        return next(iter(self._random.propose(candidates, history, pending, 1, seed)), None)

    def _asked(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], seed: int
    ) -> TrialConfig | None:
        axes = _Axes(candidates)
        if not axes.distributions:
            return None
        study = _study(int(stable_hash([seed, len(history) + len(pending)]), 16) % 2**32)
        study.add_trials([told for trial in history if (told := self._told(trial, axes)) is not None])
        study.add_trials([axes.running(config) for config in pending])
        known = known_hashes(history, pending)
        for _ in range(ASKS):
            trial = study.ask(axes.distributions)
            config = axes.config(trial.params)
            if config.hash not in known and not candidates.check(config):
                return config
            study.tell(trial, state=TrialState.FAIL)
        near = [neighbour for neighbour in candidates.neighbours(config) if neighbour.hash not in known]
        return min(near, key=lambda neighbour: stable_hash([seed, neighbour.hash]), default=None)

    def _told(self, trial: TrialRecord, axes: "_Axes") -> FrozenTrial | None:
        if trial.outcome is None or trial.outcome in UNTOLD:
            return None
        score = self._score(trial)
        wins = score is not None and math.isfinite(score)
        return create_trial(
            value=score if wins else 0.0,
            params=axes.params(trial.config),
            distributions=axes.distributions,
            constraints={"can_win": 0.0 if wins else 1.0},
        )


class _Axes:
    """The knobs that vary, as Optuna's distributions, and both ways between its parameters and configurations."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._domains = {name: tuple(values) for name, values in candidates.domains.items() if len(values) > 1}
        self.distributions = {name: _distribution(values) for name, values in self._domains.items()}

    def config(self, params: dict[str, Any]) -> TrialConfig:
        values = {name: self._domains[name][place] for name, place in params.items()}
        return self._candidates.admitted(self._candidates.base.replace(values))

    def params(self, config: TrialConfig) -> dict[str, Any]:
        return {name: _place(values, getattr(config, name)) for name, values in self._domains.items()}

    def running(self, config: TrialConfig) -> FrozenTrial:
        return create_trial(state=TrialState.RUNNING, params=self.params(config), distributions=self.distributions)


def _distribution(values: Sequence[Value]) -> BaseDistribution:
    last = len(values) - 1
    return IntDistribution(0, last) if _is_ordered(values) else CategoricalDistribution(tuple(range(last + 1)))


def _is_ordered(values: Sequence[Value]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _place(values: Sequence[Value], value: Value) -> int:
    """Index of the value, or of the nearest: a canonical configuration has sizes clipped, and unused knobs at their default."""
    if value in values:
        return values.index(value)
    if not _is_ordered(values) or isinstance(value, str):
        return 0
    return min(range(len(values)), key=lambda place: abs(float(values[place]) - float(value)))


def _study(seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(n_startup_trials=1, seed=seed)
    return optuna.create_study(direction="maximize", sampler=sampler)
