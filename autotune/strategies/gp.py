"""Optuna's Gaussian process."""

from optuna.samplers import BaseSampler, GPSampler

from autotune.strategies.optuna_study import StudyStrategy


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
