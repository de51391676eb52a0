"""Optuna's samplers as strategies: tree-structured Parzen estimator, Gaussian process, NSGA-II."""

from typing import Any

from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler

from autotune.strategies.adviser import STARTUP_TRIALS
from autotune.strategies.optuna_study import StudyStrategy


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
