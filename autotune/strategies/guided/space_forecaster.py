"""Predictions for the configurations of a search space, for guided search.

It also counts the settings in which configurations depart from the base of their space. Equations count a knob's purpose but
not its full cost: hooks, copies, one more event to wait for. If predictions cannot distinguish configurations, the one with
the fewest changed settings is the better guess, and easier to read.

In a second stage, knobs that only split communication and the loss are tuned around the best configuration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.cases.grid_cases import GridCases
from autotune.prediction.equations.cases import Cases
from autotune.prediction.equations.memory import Memory, memory
from autotune.prediction.equations.step import predict, seconds_of
from autotune.prediction.fitting.lessons import Lessons
from autotune.prediction.fitting.likeness import Numbers, knob_features, numbers_of
from autotune.prediction.planning.scan import NOT_SCANNED
from autotune.strategies.guided.acquisition import trial_seconds
from autotune.strategies.guided.described import Array, Described, Index, joined
from autotune.strategies.guided.prior import Prior, fitted_to, milestone, timed_trials
from autotune.strategies.guided.setting import JobSetting
from autotune.strategies.guided.space_pool import Order, SpacePool
from autotune.strategies.strategy import Candidates
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

_BUCKETS = (
    "reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "loss_chunk_size",
    "overlap_comm",
)  # fmt: skip
"""Layout settings; bytes are comparable tag by tag only if these are equal."""


class SpaceForecaster:
    """Predicts with the equations and the residuals learned from earlier jobs."""

    def __init__(self, setting: JobSetting, prior: Prior, pools: dict[str, SpacePool] | None = None) -> None:
        """`pools`: pools already selected, by hash of the space; None: none yet."""
        self._setting, self._prior = setting, prior
        self._lessons = Lessons(prior.lessons)
        self._pools = pools if pools is not None else {}
        self._later: tuple[tuple[int, ...], SpaceForecaster] | None = None

    def pool(self, candidates: Candidates) -> "_DescribedPool":
        """The candidates that are predicted to be fastest; all of a space of up to `LARGEST_POOL`.

        Raises:
            SpaceTooLargeError: there are too many to predict.
            TypeError: the candidates are not a search space.
        """
        if not isinstance(candidates, SearchSpace):
            raise TypeError("only configurations of a search space can be predicted by the equations")
        if candidates.hash not in self._pools:
            setting, order = self._setting, Order(seconds=self._ranking_key, margin=self._margin)
            self._pools[candidates.hash] = SpacePool(
                candidates, lambda space, grid: GridCases(space, setting.model, setting.engine, grid), order
            )
        return _DescribedPool(self._pools[candidates.hash], self._described)

    def after(self, history: Sequence[TrialRecord]) -> "SpaceForecaster":
        """Return a forecaster with coefficients fitted to the first trials, up to a milestone, so that fits are rare.

        If there are residuals of earlier jobs on the same hardware, the coefficients stay: the residuals are relative to them.
        """
        timed = [] if self._prior.lessons else timed_trials(history)
        timed = timed[: milestone(len(timed))]
        if not timed:
            return self
        key = tuple(trial.number for trial in timed)
        if self._later is None or self._later[0] != key:
            rates = fitted_to(timed, self._setting, self._prior.rates)
            self._later = key, SpaceForecaster(self._setting, replace(self._prior, rates=rates), self._pools)
        return self._later[1]

    def describe(self, configs: Sequence[TrialConfig]) -> Described:
        """Predictions for any configurations of the model on the cluster."""
        alike: dict[tuple[str, str], list[int]] = {}
        for position, config in enumerate(configs):
            alike.setdefault((config.precision, config.attention_backend), []).append(position)
        if not alike:
            return self._of((self._setting.space.base,)).take(np.empty(0, dtype=np.int64))
        parts = [self._of([configs[position] for position in positions]) for positions in alike.values()]
        described = parts[0]
        for part in parts[1:]:
            described = joined(described, part)
        return described.take(np.argsort(np.concatenate([np.array(positions) for positions in alike.values()])))

    def around(self, best: TrialConfig, log_rate: float) -> Sequence[TrialConfig]:
        """Moves of the knobs that the pool keeps fixed, for knobs that act on a relevant part of the step."""
        setting = self._setting
        cases = cases_of(setting.model, setting.cluster, setting.workload, [best], setting.engine)
        parts = {name: float(seconds[0]) for name, seconds in predict(cases, self._prior.rates).parts.items()}
        return moves(setting.space, best, parts, setting.workload.global_batch_size / float(np.exp(log_rate)))

    def _of(self, configs: Sequence[TrialConfig]) -> Described:
        setting = self._setting
        cases = cases_of(setting.model, setting.cluster, setting.workload, configs, setting.engine)
        return self._described(cases, numbers_of(configs))

    def _described(self, cases: Cases, numbers: Numbers) -> Described:
        count = len(cases)
        seconds = np.broadcast_to(seconds_of(cases, self._prior.rates), count)
        usage = memory(cases, self._prior.rates)
        needed, room = self._tightest(usage)
        features = knob_features(cases, numbers)
        lessons = self._lessons.added(features)
        rate = np.log(self._setting.workload.global_batch_size / seconds)
        share = self._setting.memory_share
        small = -np.log(np.broadcast_to(usage.allocated, count))
        # Reserved bytes and those outside of the allocator follow from these.
        compared = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
        return Described(
            log_rate=(1 - share) * rate + share * small,
            learned=(1 - share) * lessons,
            penalty=penalties(self._setting.space, numbers, count),
            features=features,
            needed=np.broadcast_to(needed, count),
            outside=np.broadcast_to(usage.by_tag["context"] + 0 * needed, count),
            tags=np.stack([np.broadcast_to(usage.by_tag[tag], count) for tag in compared], axis=1),
            room=np.broadcast_to(room, count),
            memory_spread=np.full(count, self._prior.rates.memory_spread),
            kind=_kinds(cases),
            cost=trial_seconds(seconds * np.exp(-lessons), self._setting.fidelity),
            mesh=_mixed(cases, ("tensor", "pipeline", "context", "expert", "expert_tensor", "virtual_stages", "shard")),
        )

    def _tightest(self, usage: Memory) -> tuple[Array, Array]:
        """Bytes needed and available, of the device or of the rank's share of the host, whichever is fuller."""
        room = self._setting.room + 0 * usage.needed
        host = usage.host / self._setting.host_room
        return usage.needed * np.maximum(1.0, host / (usage.needed / room)), room

    def _ranking_key(self, cases: Cases) -> Array:
        share = self._setting.memory_share
        if share == 0:
            return seconds_of(cases, self._prior.rates)
        peak = memory(cases, self._prior.rates).allocated
        keys: Array = peak**share * seconds_of(cases, self._prior.rates) ** (1 - share) if share < 1 else peak
        return keys

    def _margin(self, cases: Cases) -> Array:
        needed, room = self._tightest(memory(cases, self._prior.rates))
        margin: Array = np.log(room / needed) / self._prior.rates.memory_spread
        return margin


class _DescribedPool:
    """The pool of a space with its predictions, computed once."""

    def __init__(self, pool: SpacePool, describe: Callable[[Cases, Numbers], Described]) -> None:
        self._pool = pool
        self.described = pool.describe(describe)

    def config(self, position: int) -> TrialConfig:
        return self._pool.config(position)

    def places(self, configs: Sequence[TrialConfig]) -> Index:
        return self._pool.places(configs)


def _kinds(cases: Cases) -> Index:
    """Numbers that are equal for equal buckets on the same side of one micro-batch per step."""
    single = np.broadcast_to(cases.layouts.accumulation == 1, len(cases)).astype(np.int64)
    return _mixed(cases, _BUCKETS) * 2 + single


def _mixed(cases: Cases, names: Sequence[str]) -> Index:
    """A number for each combination of these layout settings, the same in every process."""
    mixed = np.zeros(len(cases), dtype=np.int64)
    for name in names:
        mixed = (mixed * 1_000_003 + getattr(cases.layouts, name).astype(np.int64)) % (1 << 40)
    return mixed


PENALTY = 0.01
"""Subtracted from the logarithm of a rate for each setting that differs from the base."""


def penalties(space: SearchSpace, numbers: Numbers, count: int) -> Array:
    """(n,) The penalty subtracted from the logarithm of each configuration's rate."""
    settings = np.zeros(count)
    for name, values in space.domains.items():
        if len(values) > 1:
            settings += numbers(name, partial(_departs, getattr(space.base, name)))
    return PENALTY * settings


def _departs(base: Value, value: Value) -> float:
    return float(value != base)


def moves(space: SearchSpace, best: TrialConfig, parts: Mapping[str, float], measured: float) -> Sequence[TrialConfig]:
    """Legal configurations one move away from the best, for knobs that act on a relevant part of the step.

    The time a knob acts on is bounded by measurement: its predicted parts plus all that the prediction does not explain.

    Args:
        space: the space to choose from.
        best: the best so far.
        parts: predicted seconds of a step by part.
        measured: seconds of a step.
    """
    unexplained = max(measured - sum(parts.values()), 0.0)
    configs: dict[TrialConfig, None] = {}
    for knob in (name for name in space.domains if name in NOT_SCANNED):
        acted_on = sum(parts.get(part, 0.0) for part in KNOBS[knob].acts_on) + unexplained
        if acted_on < 0.01 * measured:  # no move can gain more
            continue
        for value in space.domains[knob]:
            moved = space.admitted(best.replace({knob: value}))
            if moved != best and not space.check(moved):
                configs[moved] = None
    return list(configs)
