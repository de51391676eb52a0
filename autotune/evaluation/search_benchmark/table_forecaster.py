"""What is predicted of a table's configurations, for guided search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.evaluation.search_benchmark.groups import Group, Lesson
from autotune.evaluation.table_predictor import TablePredictor
from autotune.evaluation.validation.row import Row
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.memory import TAGS
from autotune.prediction.fitting.residual import features
from autotune.strategies.guided.described import Array, Described, Index
from autotune.strategies.strategy import Candidates
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

Disturb = Callable[[Coefficients], Coefficients]
Asked = tuple[Lesson, Sequence[Group]]
"""A lesson and its groups."""
TRUST = 0.5
"""Share that is believed of what other groups of the source make of the equations' times: measurements of others carry over
that far."""


@dataclass(frozen=True, slots=True, eq=False)
class _TablePool:
    described: Described
    configs: Sequence[TrialConfig]
    at: dict[TrialConfig, int]

    def config(self, place: int) -> TrialConfig:
        return self.configs[place]

    def places(self, configs: Sequence[TrialConfig]) -> Index:
        return np.array([self.at.get(config, -1) for config in configs], dtype=np.int64)


class TableForecaster:
    """Predicts the configurations of one group from rows of other groups alone."""

    def __init__(self, configs: Sequence[TrialConfig], rows: Sequence[Row], work: Array, predictor: TablePredictor) -> None:
        """`rows`: what was run, without what was measured; `work`: what a rate counts of a step."""
        at = {config: place for place, config in enumerate(configs)}
        self._pool = _TablePool(_described(rows, work, predictor), configs, at)

    def pool(self, candidates: Candidates) -> _TablePool:  # noqa: ARG002  one group is all there is
        """All configurations of the group."""
        return self._pool

    def describe(self, configs: Sequence[TrialConfig]) -> Described:
        """Configurations of the group."""
        return self._pool.described.take(self._pool.places(configs))

    def after(self, history: Sequence[TrialRecord]) -> "TableForecaster":  # noqa: ARG002
        """This one: what its equations know was fitted to other groups."""
        return self

    def around(self, best: TrialConfig, log_rate: float) -> Sequence[TrialConfig]:  # noqa: ARG002
        """None: the pool has all."""
        return ()


def forecasters(asked: Asked, predictor: TablePredictor, disturbs: Sequence[Disturb | None]) -> list[list[TableForecaster]]:
    """Of each disturbance a forecaster for each group that is predicted after the lesson, fitted once."""
    lesson, groups = asked
    known = predictor if lesson.fitted is None else predictor.calibrated(lesson.fitted)
    return [
        [TableForecaster(group.configs, group.asked, group.work, known.disturbed(disturb)) for group in groups]
        for disturb in disturbs
    ]


def _described(rows: Sequence[Row], work: Array, predictor: TablePredictor) -> Described:
    found = predictor.described(rows)
    count, ones = len(rows), np.ones(len(rows))
    memory, cases = found.fullest, found.cases
    return Described(
        log_rate=np.log(work / (found.prediction.seconds * ones)),
        learned=-TRUST * found.learned,
        doubt=np.zeros(len(found.learned)),
        features=features(cases),
        needed=memory.needed * found.beyond * ones,
        outside=memory.by_tag["context"] * ones,
        tags=np.stack([memory.by_tag[tag] * ones for tag in TAGS if tag not in ("reserved", "context")], axis=1),
        room=memory.usable(cases) * ones,
        memory_spread=np.full(count, found.rates.memory_spread),
        kind=np.broadcast_to(cases.layouts.accumulation == 1, count).astype(np.int64),
        cost=ones,
        mesh=np.zeros(count, dtype=np.int64),
    )
