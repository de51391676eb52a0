"""Predictions for a table's configurations, for guided search."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.knowledge.row import TableRow
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.memory import TAGS
from autotune.prediction.fitting.features import features
from autotune.strategies.guided.described import Array, Described, Index
from autotune.strategies.strategy import Candidates
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.search.tables.groups import CalibrationSplit, Group
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

Disturb = Callable[[Coefficients], Coefficients]
SplitGroups = tuple[CalibrationSplit, Sequence[Group]]
"""A split and its groups."""
TRUST = 0.5
"""Weight of the residuals learned from other groups of the source: measurements by others carry over only to this degree."""


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
    """Predicts the configurations of one group only from rows of other groups."""

    def __init__(
        self, configs: Sequence[TrialConfig], rows: Sequence[TableRow], work: Array, predictor: TablePredictor
    ) -> None:
        """`rows`: configurations without measurements; `work`: the work per step that a rate counts."""
        at = {config: place for place, config in enumerate(configs)}
        self._pool = _TablePool(_described(rows, work, predictor), configs, at)

    def with_memory(self, factor: float) -> "TableForecaster":
        """The same with every predicted memory multiplied: to test strategies that rely on wrong verdicts."""
        other, described = copy.copy(self), self._pool.described
        other._pool = dataclasses.replace(
            self._pool, described=dataclasses.replace(described, needed=described.needed * factor)
        )
        return other

    def pool(self, candidates: Candidates) -> _TablePool:  # noqa: ARG002  there is only one group
        """All configurations of the group."""
        return self._pool

    def describe(self, configs: Sequence[TrialConfig]) -> Described:
        """Predictions for configurations of the group."""
        return self._pool.described.take(self._pool.places(configs))

    def after(self, history: Sequence[TrialRecord]) -> "TableForecaster":  # noqa: ARG002
        """Return this forecaster: its equations are fitted only to other groups."""
        return self

    def around(self, best: TrialConfig, log_rate: float) -> Sequence[TrialConfig]:  # noqa: ARG002
        """Empty: the pool contains all configurations."""
        return ()


def forecasters(
    split_groups: SplitGroups, predictor: TablePredictor, disturbs: Sequence[Disturb | None]
) -> list[list[TableForecaster]]:
    """For each disturbance, a forecaster for each group of the split; the predictor is fitted once."""
    split, groups = split_groups
    known = predictor if split.fitted is None else predictor.calibrated(split.fitted)
    return [
        [TableForecaster(group.configs, group.asked, group.work, known.disturbed(disturb)) for group in groups]
        for disturb in disturbs
    ]


def _described(rows: Sequence[TableRow], work: Array, predictor: TablePredictor) -> Described:
    found = predictor.described(rows)
    count, ones = len(rows), np.ones(len(rows))
    memory, cases = found.fullest, found.cases
    return Described(
        log_rate=np.log(work / (found.prediction.seconds * ones)),
        learned=-TRUST * found.learned,
        penalty=np.zeros(len(found.learned)),
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
