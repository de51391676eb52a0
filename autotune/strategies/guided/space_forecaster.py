"""The candidates of a search space as arrays, for guided search: those predicted to be fastest among those that may fit.

It also counts the settings in which configurations depart from the base of their space. Equations count a knob's purpose but
not its full cost: hooks, copies, one more event to wait for. If predictions cannot distinguish configurations, the one with
the fewest changed settings is the better guess, and easier to read.

In a second stage, knobs that only split communication and the loss are tuned around the best configuration.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.cases.grid import Codes, ConfigGrid, KnobRows
from autotune.prediction.cases.grid_cases import GridCases, numbers
from autotune.prediction.equations.cases import Cases
from autotune.prediction.equations.memory import Memory, memory
from autotune.prediction.equations.step import predict, seconds_of
from autotune.prediction.fitting.features import Numbers, knob_features, numbers_of
from autotune.prediction.fitting.residuals import ResidualProcess
from autotune.prediction.planning.memory_fit import probability_within, ranks_of_node
from autotune.prediction.planning.scan import NOT_SCANNED, uniform_parts, without_buckets
from autotune.strategies.guided.described import Array, Described, Index, joined
from autotune.strategies.guided.prior import JobSetting, Prior, fitted_to, milestone, timed_trials
from autotune.strategies.guided.strategy import trial_seconds
from autotune.strategies.strategy import Candidates
from search_spaces.canonical import SEARCH_ORDER
from search_spaces.errors import SpaceTooLargeError
from search_spaces.knob_values import KNOBS
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

LARGEST_POOL = 200_000
"""Number of candidates kept: the fastest predicted ones that may fit; all of a smaller space."""
WHOLE = 20_000
"""Largest space in which knobs that only split communication are searched like all others: `choose` considers this many at
once. In a larger space they are tuned around the best."""
MOST_PREDICTED = 10_000_000
"""Number of configurations predicted before a space is refused as too large: about 30 seconds."""


@dataclass(slots=True)
class _KeptCandidates:
    """Kept candidates of one precision and one attention kernel."""

    grid: ConfigGrid
    cases: GridCases[KnobRows]
    codes: Codes
    order: Array
    """Key by which the best are kept; lower is better."""


class SpacePool:
    """The candidates that `describe` predicts together.

    In a space of more than `WHOLE` configurations, knobs that only split communication stay fixed (`without_buckets`): they are
    tuned around the best later.
    """

    def __init__(
        self, space: SearchSpace, make_cases: Callable[[SearchSpace, ConfigGrid], GridCases[KnobRows]], order: "Order"
    ) -> None:
        """Raises SpaceTooLargeError if the space has more than `MOST_PREDICTED` configurations."""
        self._parts = _kept(space, make_cases, order)
        self._firsts = np.cumsum([0, *(len(part.codes) for part in self._parts)])
        self._at = {
            (number, row.tobytes()): first + index
            for number, (part, first) in enumerate(zip(self._parts, self._firsts, strict=False))
            for index, row in enumerate(part.codes)
        }

    def describe(self, describe: Callable[[Cases, Numbers], Described]) -> Described:
        """Predictions for all candidates, in a fixed order.

        `describe` makes the predictions for cases; its numbers are those of knobs that no equation uses.
        """
        described_parts = [describe(part.cases.at(part.codes), _numbers(part)) for part in self._parts]
        described = described_parts[0]
        for more in described_parts[1:]:
            described = joined(described, more)
        return described

    def config(self, position: int) -> TrialConfig:
        """The candidate at a position."""
        number = int(np.searchsorted(self._firsts, position, side="right")) - 1
        part = self._parts[number]
        return part.grid.config_of(part.codes[position - self._firsts[number]])

    def places(self, configs: Sequence[TrialConfig]) -> Index:
        """Positions of configurations; -1: not in the pool."""
        return np.array([self._place(config) for config in configs], dtype=np.int64)

    def _place(self, config: TrialConfig) -> int:
        for number, part in enumerate(self._parts):
            codes = _codes(part.grid, config)
            if codes is not None and (position := self._at.get((number, codes.tobytes()))) is not None:
                return int(position)
        return -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Quick predictions for candidates, used to keep the best of a large space."""

    seconds: Callable[[Cases], Array]
    margin: Callable[[Cases], Array]
    """Standard deviations between predicted and available memory."""


def _kept(
    space: SearchSpace, make_cases: Callable[[SearchSpace, ConfigGrid], GridCases[KnobRows]], order: Order
) -> list[_KeptCandidates]:
    parts: list[_KeptCandidates] = []
    predicted = 0
    for uniform in uniform_parts(space if space.count() <= WHOLE else without_buckets(space)):
        grid = ConfigGrid(uniform)
        part = _KeptCandidates(grid, make_cases(uniform, grid), np.empty((0, len(SEARCH_ORDER)), dtype=np.int16), np.empty(0))
        parts.append(part)
        for rows in grid.blocks():
            predicted += rows.count * grid.sides.count
            if predicted > MOST_PREDICTED:
                problem = f"it has more than {MOST_PREDICTED:,} configurations, and guided search predicts each of them"
                raise SpaceTooLargeError("space", problem, "pin some knobs, choose a smaller space, or use --strategy tpe")
            cases, shape = part.cases.of(rows), (rows.count, grid.sides.count)
            seconds = np.broadcast_to(order.seconds(cases), shape).ravel()
            fits = probability_within(np.broadcast_to(order.margin(cases), shape).ravel())
            # Candidates that hardly fit come last and are kept if there is space for all.
            ranked = np.where(fits < 0.005, 1e12 * (2 - fits), seconds)
            part.codes = np.concatenate([part.codes, grid.codes_at(rows, np.arange(len(ranked)))])
            part.order = np.concatenate([part.order, ranked])
            if sum(len(pool_part.codes) for pool_part in parts) > 2 * LARGEST_POOL:
                _prune(parts)
    _prune(parts)
    return [part for part in parts if len(part.codes)]


def _prune(parts: Sequence[_KeptCandidates]) -> None:
    every = np.concatenate([part.order for part in parts])
    if len(every) <= LARGEST_POOL:
        return
    last = np.partition(every, LARGEST_POOL - 1)[LARGEST_POOL - 1]
    for part in parts:
        mask = (part.order <= last) & (part.order < 1e12)
        part.codes, part.order = part.codes[mask], part.order[mask]


def _numbers(part: _KeptCandidates) -> Numbers:
    return lambda name, meaning: numbers(part.grid, name, part.codes[:, SEARCH_ORDER.index(name)], meaning)


def _codes(grid: ConfigGrid, config: TrialConfig) -> Codes | None:
    """The codes of a configuration; None: the grid lacks one of its values."""
    codes = []
    for name, values in zip(SEARCH_ORDER, grid.values, strict=True):
        value = getattr(config, name)
        if value not in values:
            return None
        codes.append(values.index(value))
    return np.array(codes, dtype=np.int16)


class SpaceForecaster:
    """Predicts with the equations and the residuals learned from earlier jobs."""

    def __init__(self, setting: JobSetting, prior: Prior, pools: dict[str, SpacePool] | None = None) -> None:
        """`pools`: pools already selected, by hash of the space; None: none yet."""
        self._setting, self._prior = setting, prior
        self._residuals = ResidualProcess(prior.residuals)
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
        timed = [] if self._prior.residuals else timed_trials(history)
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
        residuals = self._residuals.added(features)
        rate = np.log(self._setting.workload.global_batch_size / seconds)
        share = self._setting.memory_share
        small = -np.log(np.broadcast_to(usage.allocated, count))
        # Reserved bytes and those outside of the allocator follow from these.
        compared = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
        return Described(
            log_rate=(1 - share) * rate + share * small,
            learned=(1 - share) * residuals,
            penalty=penalties(self._setting.space, numbers, count),
            features=features,
            needed=np.broadcast_to(needed, count),
            outside=np.broadcast_to(usage.by_tag["context"] + 0 * needed, count),
            tags=np.stack([np.broadcast_to(usage.by_tag[tag], count) for tag in compared], axis=1),
            room=np.broadcast_to(room, count),
            memory_spread=np.full(count, self._prior.rates.memory_spread),
            kind=_kinds(cases),
            cost=trial_seconds(seconds * np.exp(-residuals), self._setting.fidelity),
            mesh=_mixed(cases, ("tensor", "pipeline", "context", "expert", "expert_tensor", "virtual_stages", "shard")),
        )

    def _tightest(self, usage: Memory) -> tuple[Array, Array]:
        """Bytes needed and available, of the device or of the rank's share of the host, whichever is fuller."""
        room = self._setting.room + 0 * usage.needed
        cluster = self._setting.cluster
        host = usage.host / (cluster.host_memory_bytes / ranks_of_node(cluster))
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
    """Numbers that are equal for equal buckets on the same side of one micro-batch per step.

    Only then bytes are comparable tag by tag.
    """
    single = np.broadcast_to(cases.layouts.accumulation == 1, len(cases)).astype(np.int64)
    buckets = (
        "reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "loss_chunk_size",
        "overlap_comm",
    )  # fmt: skip
    return _mixed(cases, buckets) * 2 + single


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
            settings += numbers(name, partial(operator.ne, getattr(space.base, name)))
    return PENALTY * settings


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
