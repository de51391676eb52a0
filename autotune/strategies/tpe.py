"""Optuna's tree-structured Parzen estimator."""

from optuna.samplers import BaseSampler, TPESampler

from autotune.strategies.optuna_study import StudyStrategy


class TpeStrategy(StudyStrategy):
    """`TPESampler`, multivariate and with a constant liar for running trials (Watanabe 2023, arXiv 2304.11127)."""

    def sampler(self, seed: int) -> BaseSampler:
        return TPESampler(n_startup_trials=1, seed=seed)
