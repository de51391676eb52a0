"""Optuna's genetic algorithm."""

from typing import Any

from optuna.samplers import BaseSampler, NSGAIISampler

from autotune.strategies.adviser import STARTUP_TRIALS
from autotune.strategies.optuna_study import StudyStrategy

POPULATION = STARTUP_TRIALS
"""Trials of a generation. Optuna's own 50 would be a random search for as long as a sweep lasts."""


class Nsga2Strategy(StudyStrategy):
    """`NSGAIISampler` (Deb 2002, doi 10.1109/4235.996017) with generations of `POPULATION` trials in the order of the rows.

    With one objective its sorting is by the constraint first and by the score then. Children that are known already cost
    nothing and are bred again.
    """

    def sampler(self, seed: int) -> BaseSampler:
        return NSGAIISampler(population_size=POPULATION, seed=seed)

    def attributes(self, number: int) -> dict[str, Any]:
        return {"NSGAIISampler:generation": number // POPULATION}
