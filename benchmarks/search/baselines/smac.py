"""SMAC3: a random forest for many discrete knobs. `pip install 'smac>=2.4,<3'` brings it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

from autotune.errors import RequestError
from autotune.strategies.optuna_samplers import AdviserStrategy, Axes, ObservedTrial

try:
    from ConfigSpace import Categorical, Configuration, ConfigurationSpace, Integer
    from smac import HyperparameterOptimizationFacade, Scenario
    from smac.acquisition.maximizer import LocalSearch
    from smac.main.exceptions import ConfigurationSpaceExhaustedException
    from smac.runhistory import StatusType, TrialInfo, TrialValue
except ImportError as missing:
    raise RequestError("strategy", f"smac needs {missing.name}", "pip install 'smac>=2.4,<3'") from missing


class SmacStrategy(AdviserStrategy):
    """SMAC3's facade for hyperparameters (Lindauer 2022, jmlr.org/papers/v23/21-0888.html) with its default settings: a
    random forest, log expected improvement, every fifth answer at random.

    It has no constraints: a trial that cannot win is reported as crashed, with a cost as far above the worst as the worst is
    above the best. Its initial design is omitted, since the first trials come from `random` as for every other adviser.
    """

    def answers(
        self, axes: Axes, observed: Sequence[ObservedTrial], running: Sequence[Mapping[str, int]], seed: int
    ) -> Iterator[Mapping[str, int]]:
        logging.getLogger("smac").setLevel(logging.ERROR)
        space = ConfigurationSpace(seed=seed)
        space.add(
            [
                Integer(name, (0, size - 1)) if name in axes.ordered else Categorical(name, list(range(size)))
                for name, size in axes.sizes.items()
            ]
        )
        with TemporaryDirectory() as folder, suppress(ConfigurationSpaceExhaustedException):
            # The job counts the trials.
            smac = _facade(Scenario(space, deterministic=True, n_trials=10**9, seed=seed, output_directory=folder))
            for trial, value in zip(observed, _values(observed), strict=True):
                smac.tell(_trial(space, trial.places), value, save=False)
            for places in running:
                smac.runhistory.add_running_trial(_trial(space, places))
            while True:
                yield {name: int(index) for name, index in dict(smac.ask().config).items()}


class _OrderedLocalSearch(LocalSearch):  # type: ignore[misc]
    """A local search that starts in one order; SMAC's is that of a set, which differs between processes."""

    def _get_initial_points(self, *args: Any, **options: Any) -> list[Any]:
        return sorted(super()._get_initial_points(*args, **options), key=lambda config: config.get_array().tolist())


def _facade(scenario: Any) -> Any:
    kind = HyperparameterOptimizationFacade
    design = kind.get_initial_design(scenario, n_configs=0)
    maximizer = kind.get_acquisition_maximizer(scenario)
    maximizer._local_search = _OrderedLocalSearch(scenario.configspace, seed=scenario.seed)
    return kind(
        scenario, _never_called, initial_design=design, acquisition_maximizer=maximizer, overwrite=True, logging_level=False
    )  # fmt: skip


def _never_called(config: Any, seed: int) -> float:
    raise NotImplementedError("trials are run by the job")


def _trial(space: Any, places: Mapping[str, int]) -> Any:
    return TrialInfo(Configuration(space, values=dict(places)), seed=0)


def _values(observed: Sequence[ObservedTrial]) -> list[Any]:
    costs = [-trial.score for trial in observed]
    lost = max(costs) + max(max(costs) - min(costs), 1.0) if costs else 0.0
    return [
        TrialValue(cost=cost, status=StatusType.SUCCESS) if trial.wins else TrialValue(cost=lost, status=StatusType.CRASHED)
        for trial, cost in zip(observed, costs, strict=True)
    ]
