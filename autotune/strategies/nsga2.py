"""Optuna's genetic algorithm."""

from typing import Any

from optuna.samplers import BaseSampler, NSGAIISampler

from autotune.strategies.adviser import STARTUP_TRIALS
from autotune.strategies.optuna_study import StudyStrategy

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
