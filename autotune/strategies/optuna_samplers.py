"""Optuna's samplers (TPE, Gaussian process, NSGA-II) as strategies: a study rebuilt from the trials at each call."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.strategies.adviser import STARTUP_TRIALS, AdviserStrategy, Axes, ObservedTrial


class StudyStrategy(AdviserStrategy):
    """An in-memory study with an Optuna sampler; pending trials are running ones.

    An unusable answer stays a running trial: samplers avoid running trials, so the next answer differs.
    """

    @abstractmethod
    def sampler(self, seed: int) -> BaseSampler:
        """Create the sampler."""

    def attributes(self, number: int) -> dict[str, Any]:  # noqa: ARG002  most samplers store nothing with a trial
        """System attributes that the sampler would have stored with the trial of that number."""
        return {}

    def answers(
        self, axes: Axes, observed: Sequence[ObservedTrial], running: Sequence[Mapping[str, int]], seed: int
    ) -> Iterator[Mapping[str, int]]:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(direction="maximize", sampler=self.sampler(seed))
        distributions = {name: _distribution(size, name in axes.ordered) for name, size in axes.sizes.items()}
        study.add_trials([self._ended(number, trial, distributions) for number, trial in enumerate(observed)])
        study.add_trials(
            [create_trial(state=TrialState.RUNNING, params=dict(trial), distributions=distributions) for trial in running]
        )
        while True:
            yield study.ask(distributions).params

    def _ended(self, number: int, observed: ObservedTrial, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
        return create_trial(
            value=observed.score,
            params=dict(observed.places),
            distributions=distributions,
            constraints={"can_win": 0.0 if observed.wins else 1.0},
            system_attrs=self.attributes(number),
        )


def _distribution(size: int, ordered: bool) -> BaseDistribution:
    return IntDistribution(0, size - 1) if ordered else CategoricalDistribution(tuple(range(size)))


class TpeStrategy(StudyStrategy):
    """`TPESampler`, multivariate and with a constant liar for running trials (Watanabe 2023, arXiv 2304.11127)."""

    def sampler(self, seed: int) -> BaseSampler:
        return TPESampler(n_startup_trials=1, seed=seed)


class GpStrategy(StudyStrategy):
    """`GPSampler`: log expected improvement (Ament 2023, arXiv 2310.20708) times the probability that a trial can win, which a
    second process learns from out-of-memory and failed trials (Gardner 2014, proceedings.mlr.press/v32/gardner14).

    Each ask refits both: 1.6 s after 200 trials, and several times that while other trials run. So in a small space it is asked
    once, and the configuration nearest to its answer is taken: another ask would hardly move the optimum.
    """

    slow = True

    asks = 1

    def sampler(self, seed: int) -> BaseSampler:
        return GPSampler(n_startup_trials=1, seed=seed, warn_independent_sampling=False)


POPULATION = STARTUP_TRIALS
"""Trials per generation. With Optuna's default of 50, a whole sweep would be a random search."""


class Nsga2Strategy(StudyStrategy):
    """`NSGAIISampler` (Deb 2002, doi 10.1109/4235.996017) with generations of `POPULATION` trials in the order of the rows.

    With one objective it sorts by the constraint, then by the score. Known children cost nothing: others are bred instead.
    """

    def sampler(self, seed: int) -> BaseSampler:
        return NSGAIISampler(population_size=POPULATION, seed=seed)

    def attributes(self, number: int) -> dict[str, Any]:
        return {"NSGAIISampler:generation": number // POPULATION}
