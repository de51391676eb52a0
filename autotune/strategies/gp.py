"""Optuna's Gaussian process."""

from optuna.samplers import BaseSampler, GPSampler

from autotune.strategies.optuna_study import StudyStrategy


class GpStrategy(StudyStrategy):
    """`GPSampler`: log expected improvement (Ament 2023, arXiv 2310.20708) times the probability that a trial can win, which a
    second process learns from what was out of memory or failed (Gardner 2014, proceedings.mlr.press/v32/gardner14).

    An ask fits both anew: 1.6 s after 200 trials, and several times that while other trials run. So it is asked once where
    there are few configurations, and the one that lies nearest to its answer is taken: its optimum hardly moves anyway.
    """

    slow = True

    asks = 1

    def sampler(self, seed: int) -> BaseSampler:
        return GPSampler(n_startup_trials=1, seed=seed, warn_independent_sampling=False)
