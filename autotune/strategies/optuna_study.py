"""Base of the strategies that use Optuna samplers: a study rebuilt from the trials at each call."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.strategies.adviser import AdviserStrategy, ObservedTrial
from autotune.strategies.axes import Axes


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
        study.add_trials([self._ended(number, one, distributions) for number, one in enumerate(observed)])
        study.add_trials(
            [create_trial(state=TrialState.RUNNING, params=dict(one), distributions=distributions) for one in running]
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
