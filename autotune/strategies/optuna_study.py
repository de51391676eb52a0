"""A study of Optuna's, made anew from what is told: what its samplers have in common."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.strategies.adviser import AdviserStrategy, Told
from autotune.strategies.axes import Axes


class StudyStrategy(AdviserStrategy):
    """An in-memory study by a sampler of Optuna's: pending trials are running ones.

    An answer that is of no use stays a running trial: samplers keep away from what runs, and so answer something else.
    """

    @abstractmethod
    def sampler(self, seed: int) -> BaseSampler:
        """The sampler that is asked."""

    def attributes(self, number: int) -> dict[str, Any]:  # noqa: ARG002  most samplers keep nothing with a trial
        """What the sampler would have noted of the trial with that number."""
        return {}

    def answers(
        self, axes: Axes, told: Sequence[Told], running: Sequence[Mapping[str, int]], seed: int
    ) -> Iterator[Mapping[str, int]]:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(direction="maximize", sampler=self.sampler(seed))
        distributions = {name: _distribution(size, name in axes.ordered) for name, size in axes.sizes.items()}
        study.add_trials([self._ended(number, one, distributions) for number, one in enumerate(told)])
        study.add_trials(
            [create_trial(state=TrialState.RUNNING, params=dict(one), distributions=distributions) for one in running]
        )
        while True:
            yield study.ask(distributions).params

    def _ended(self, number: int, told: Told, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
        return create_trial(
            value=told.score,
            params=dict(told.places),
            distributions=distributions,
            constraints={"can_win": 0.0 if told.wins else 1.0},
            system_attrs=self.attributes(number),
        )


def _distribution(size: int, ordered: bool) -> BaseDistribution:
    return IntDistribution(0, size - 1) if ordered else CategoricalDistribution(tuple(range(size)))
