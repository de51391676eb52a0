"""Uneven stages: the layers, recomputation and offloading of every pipeline rank, by an integer program.

minimise    m T + i / p * sum(work) + W
subject to  one choice for each rank; layers of all choices sum to the model's
            T >= pace of each rank's choice, W >= seconds after the micro-batches on it at the pace T

with m micro-batches, i idle micro-batches of the schedule and p ranks: the equations of `step` for a pipeline with explicit
layers. Choices that exceed a rank's memory are excluded, so memory needs no constraint and may be any function of the
choice. Solved to optimality by HiGHS [Huangfu and Hall 2018, through scipy.optimize.milp].

The program gives all layers the mean of their costs. For models whose layers differ, moves of single layers improve its
answer by full predictions: each rank has its own layers, so those without experts, or with a window, are where the model has
them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds as Between
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import RECOMPUTE, Array, Cases, Flags, RankShare, scalar
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.hardware import devices_of_ranks
from autotune.prediction.equations.memory import memory, share_memory
from autotune.prediction.equations.pipeline import idle_micro_batches
from autotune.prediction.equations.step import after_backward, seconds_of
from autotune.prediction.equations.uneven import Paces, layout_key, on_own_device, paces_of, rank_seconds, tabled
from autotune.prediction.planning.memory_fit import MemoryLimits
from autotune.prediction.planning.question import Question
from search_spaces.canonical import canonical
from search_spaces.capability import SpaceContext
from search_spaces.knob import Value
from search_spaces.models.pipeline import Stage, fill, head_in_layers, is_split, layout_text, predicting, stages_of_rank
from search_spaces.trial_config import TrialConfig

ALWAYS = scalar(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices, each for one rank. Arrays with one element per choice."""

    rank: NDArray[np.int64]
    device: NDArray[np.int64]
    """Of the rank: index in `Cases.devices`."""
    layers: NDArray[np.int64]
    policy: NDArray[np.int64]
    """Index in `RECOMPUTE`."""
    again: NDArray[np.int64]
    """Recomputed layers."""
    offloads: NDArray[np.int64]
    """1 if the optimizer state is in host memory."""
    work: Array
    """Seconds of a micro-batch in the rank's layers and its output projection."""
    pace: Array
    """Total seconds of a micro-batch on the rank."""

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, chosen: NDArray[np.int64] | Flags) -> "Options":
        """A subset of the choices."""
        return Options(**{item.name: getattr(self, item.name)[chosen] for item in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEnd:
    """Properties of a pipeline rank besides its layers."""

    first: bool
    """The input table."""
    last: bool
    """The output projection."""
    device: int
    """Index of its device in `Cases.devices`; 0 if all devices are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """Choices for a rank besides its number of layers."""

    policies: tuple[str, ...] = RECOMPUTE
    offloads: bool = False
    """Whether each rank's optimizer state may be offloaded individually."""


def options_of(
    cases: Cases, rates: Coefficients, ends: Sequence[PipelineEnd], least: int, menu: Menu, limits: MemoryLimits
) -> Options:
    """All choices of every rank that fit its memory; of those with equal layers and offloading, the fastest.

    Args:
        cases: one configuration.
        rates: coefficients.
        ends: of each rank.
        least: minimum layers of a rank: one for each of its stages.
        menu: the possible choices.
        limits: memory limits of a rank.
    """
    most = int(cases.shapes.layers[0]) - least * (len(ends) - 1)
    columns = _columns(least, most, menu)
    paces = paces_of(cases, rates)
    parts = [_of_rank(cases, rates, paces, rank, end, columns, limits) for rank, end in enumerate(ends)]
    return _fastest(
        Options(
            **{item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in dataclasses.fields(Options)}
        )
    )


def seconds_after(cases: Cases, rates: Coefficients, options: Options, pace: float) -> Array:
    """For each choice, the seconds from the end of the micro-batches to the end of the step; `pace`: of the slowest rank."""
    nothing = scalar(0)
    share = RankShare(
        pipeline_rank=options.rank.astype(np.float64), layers=options.layers.astype(np.float64), selective=nothing,
        full=nothing, offloaded=options.offloads.astype(np.float64), first=nothing, last=nothing,
        device=options.device.astype(np.float64),
    )  # fmt: skip
    after = reduce(np.add, after_backward(cases, rates, share, ALWAYS, scalar(pace)).values())
    return np.broadcast_to(after, len(options))


def _fastest(options: Options) -> Options:
    order = np.lexsort((options.pace, options.offloads, options.layers, options.rank))
    keys = np.column_stack([options.rank, options.layers, options.offloads])[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return options.take(order[first])


def _columns(least: int, most: int, menu: Menu) -> NDArray[np.int64]:
    """Layers, policy, recomputed layers, offloaded: one row per choice."""
    policies = [RECOMPUTE.index(policy) for policy in menu.policies]
    rows = [
        (layers, policy, again, offloads)
        for layers in range(least, most + 1)
        for policy in policies
        for again in (range(1, layers + 1) if policy else (0,))
        for offloads in ((0, 1) if menu.offloads else (0,))
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _of_rank(
    cases: Cases,
    rates: Coefficients,
    paces: Sequence[Paces],
    rank: int,
    end: PipelineEnd,
    columns: NDArray[np.int64],
    limits: MemoryLimits,
) -> Options:
    layers, policy, again, offloads = columns.T
    share = RankShare(
        pipeline_rank=scalar(rank), layers=layers.astype(np.float64), selective=1.0 * again * (policy == 1),
        full=1.0 * again * (policy == 2), offloaded=offloads.astype(np.float64), first=scalar(end.first), last=scalar(end.last),
        device=scalar(end.device),
    )  # fmt: skip
    usage = share_memory(cases, rates, share, (ALWAYS, ALWAYS))
    fits = np.broadcast_to(limits.holds(usage.needed, usage.host), layers.shape)
    compute, tensor = rank_seconds(paces, share, ALWAYS)
    work = compute + tensor
    pace = work + on_own_device(share, [device_paces.knobs.embedding for device_paces in paces])
    return Options(
        rank=np.full(layers.shape, rank), device=np.full(layers.shape, end.device), layers=layers, policy=policy,
        again=again, offloads=offloads, work=np.broadcast_to(work, layers.shape), pace=np.broadcast_to(pace, layers.shape),
    ).take(fits)  # fmt: skip


GAP = 1e-9
"""Relative optimality gap of a solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Weights of the objective."""

    micro_batches: float
    """Weight of the slowest rank's pace."""
    idle: float
    """Weight of all ranks' work: idle time of the schedule, in micro-batches of the mean rank, divided by the ranks."""


def solved(question: Question, config: TrialConfig, limits: MemoryLimits, menu: Menu | None = None) -> TrialConfig | None:
    """Return the configuration with the layers and recomputation of its stages that minimise its predicted step time.

    If the model's layers differ, the program uses their mean, and `improved` improves its answer.

    Its `pipeline_split`, `activation_checkpointing` and, if the menu offloads, `offload_optimizer` are ignored.

    Args:
        question: the model, the cluster and the workload.
        config: the rest: degrees, schedule, micro-batch, ZeRO stage.
        limits: memory limits of a rank.
        menu: the possible choices; None: layers and recomputation.

    Returns:
        The canonical configuration; None: no choice of stages fits or exists, or there are too many.
    """
    ranks, virtual = config.pipeline_parallel_size, config.virtual_stages
    if ranks == 1 or ranks * virtual > question.shape.num_layers:
        return None
    menu = menu or Menu()
    most_layers = question.shape.num_layers - virtual * (ranks - 1)
    recomputing = sum(1 for policy in menu.policies if policy != "none")
    # The choices of a rank grow with the square of the layers.
    choices = most_layers * (most_layers + 1) // 2 * recomputing + most_layers
    # Maximum number of choices in a program; 80 layers on 16 ranks have 70,000.
    if ranks * choices * (2 if menu.offloads else 1) > 400_000:
        return None
    plain: dict[str, Value] = {"pipeline_layout": "", "activation_checkpointing": "none", "checkpoint_every_k": 1}
    config = config.replace(plain | ({"offload_optimizer": "none"} if menu.offloads else {}))
    cases = cases_of(question.model, question.cluster, question.workload, [config], question.engine, question.arguments)
    stage_indices = [stages_of_rank(config, rank) for rank in range(ranks)]
    devices = devices_of_ranks(config, question.cluster) or (0,) * ranks
    last = ranks * virtual - 1
    ends = [
        PipelineEnd(first=0 in rank_stages, last=last in rank_stages, device=device)
        for rank_stages, device in zip(stage_indices, devices, strict=True)
    ]
    offered = options_of(cases, question.rates, ends, virtual, menu, limits)

    def after(options: Options, pace: float) -> Array:
        return seconds_after(cases, question.rates, options, pace)

    chosen = best_choice(offered, after, ranks, question.shape.num_layers, _program(cases))
    if chosen is None:
        return None
    stages = improved(question, config, limits, menu, _stages(question, config, stage_indices, chosen))
    return None if stages is None else named(question, config, stages)


def _program(cases: Cases) -> Program:
    """If ranks share cores, micro-batches run at the mean rank's pace to the degree that waiting ranks free their cores."""
    idle_cost, micro_batches = cases.hardware.idle_cost[0], cases.layouts.accumulation[0]
    at_mean = (idle_micro_batches(cases)[0] + (1 - idle_cost) * micro_batches) / cases.layouts.pipeline[0]
    return Program(micro_batches=float(idle_cost * micro_batches), idle=float(at_mean))


def best_choice(
    offered: Options, after: Callable[[Options, float], Array], ranks: int, layers: int, program: Program
) -> Options | None:
    """Return each rank's option; None: no options sum to the layers.

    Communication after the micro-batches is hidden by them, and so depends on T. T is enumerated from the least pace at which
    the ranks can hold all layers; for each value, an integer program is solved over the options that are not slower. m T grows
    faster than W falls, so a program whose slowest option is faster than its T repeats the answer of an earlier T; the loop
    ends when T by itself costs as much as the best found.
    """
    least, best = np.inf, None
    smallest = program.idle * layers * float((offered.work / offered.layers).min(initial=np.inf))
    # Seconds: a micro-batch long enough to hide everything that can be hidden.
    hidden = after(offered, 1e12).min(initial=np.inf)
    feasible = least_bottleneck(offered.pace, offered, ranks, layers)
    if feasible is None:
        return None
    paces = np.unique(offered.pace)
    for pace in paces[paces >= feasible]:
        spent = program.micro_batches * pace + smallest
        if spent + hidden >= least:
            break
        able = offered.take(offered.pace <= pace)
        follows = after(able, pace)
        floor = least_bottleneck(follows, able, ranks, layers)
        if floor is None or spent + floor >= least * (1 - GAP):
            continue
        solution = _solve(able, follows, floor, ranks, layers, program)
        if solution is not None and program.micro_batches * pace + solution[0] < least:
            least, best = program.micro_batches * pace + solution[0], able.take(solution[1])
    return best


def _solve(
    offered: Options, after: Array, floor: float, ranks: int, layers: int, program: Program
) -> tuple[float, NDArray[np.int64]] | None:
    """The minimum of i / p * sum(work) + W, and the indices of the options; None: not proved within the time limit.

    W is bounded below by the least that lets the ranks hold all layers: without that bound the solver tries equal ranks in
    every order.
    """
    count = len(offered)
    indices, every = np.arange(count), np.ones(count)
    choices = _matrix(offered.rank, indices, every, (ranks, count + 1))
    total = _matrix(0 * indices, indices, offered.layers.astype(np.float64), (1, count + 1))
    rows, columns = np.concatenate([offered.rank, np.arange(ranks)]), np.concatenate([indices, np.full(ranks, count)])
    longest = _matrix(rows, columns, np.concatenate([after, -np.ones(ranks)]), (ranks, count + 1))
    solution = milp(
        np.concatenate([program.idle * offered.work, [1.0]]),
        integrality=np.concatenate([every, [0]]),
        bounds=Between(np.concatenate([0 * every, [floor]]), np.concatenate([every, [np.inf]])),
        constraints=[
            LinearConstraint(choices, 1, 1),
            LinearConstraint(total, layers, layers),
            LinearConstraint(longest, -np.inf, 0),
        ],
        # It needs a fraction of the seconds; a solution not proved optimal by then is discarded.
        options={"time_limit": 30.0, "mip_rel_gap": GAP},
    )
    return (float(solution.fun), np.flatnonzero(solution.x[:count] > 0.5)) if solution.status == 0 else None  # optimal


def least_bottleneck(values: Array, offered: Options, ranks: int, layers: int) -> float | None:
    """The minimum of the largest of the ranks' `values` such that they hold all layers; None: they cannot."""
    steps = np.unique(values)
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        able = values <= steps[middle]
        most = np.full(ranks, -(10**9))  # so low that the sum is negative if a rank has no option
        np.maximum.at(most, offered.rank[able], offered.layers[able])
        if most.sum() >= layers:
            high = middle
        else:
            low = middle + 1
    return float(steps[low]) if low < len(steps) else None


def _matrix(rows: NDArray[np.int64], columns: NDArray[np.int64], values: Array, shape: tuple[int, int]) -> coo_array:
    return coo_array((values, (rows, columns)), shape=shape)


def _stages(question: Question, config: TrialConfig, stage_indices: Sequence[tuple[int, ...]], chosen: Options) -> list[Stage]:
    """The stages of the choice, first to last."""
    head = head_in_layers(predicting(question.shape, config), question.sequence_length)
    last = config.pipeline_parallel_size * config.virtual_stages - 1
    stages: dict[int, Stage] = {}
    for rank, rank_stages in enumerate(stage_indices):
        row = chosen.take(chosen.rank == rank)
        counts = fill([head if stage == last else 0.0 for stage in rank_stages], int(row.layers[0]))
        remaining = int(row.again[0])
        for stage, count in zip(rank_stages, counts, strict=True):
            again, policy = min(count, remaining), RECOMPUTE[row.policy[0]]
            remaining -= again
            stages[stage] = Stage(
                layers=count, recompute=policy if again else "none", recomputed=again, offloads=bool(row.offloads[0])
            )
    return [stages[stage] for stage in range(last + 1)]


def named(question: Question, config: TrialConfig, stages: Sequence[Stage]) -> TrialConfig:
    """The canonical configuration with these stages: settings common to all stages are expressed by the global knobs."""
    policies = {stage.recompute for stage in stages}
    if len(policies) == 1 and all(stage.recomputed == stage.layers for stage in stages):
        config = config.replace({"activation_checkpointing": policies.pop()})
        stages = [dataclasses.replace(stage, recompute="none", recomputed=0) for stage in stages]
    if all(stage.offloads for stage in stages):
        config = config.replace({"offload_optimizer": "cpu", "offload_ratio": 1.0})
        stages = [dataclasses.replace(stage, offloads=False) for stage in stages]
    context = SpaceContext(
        model=question.model, cluster=question.cluster, workload=question.workload, world_size=question.cluster.world_size
    )
    text, even = layout_text(stages), config.replace({"pipeline_split": "even"})
    if is_split(text, even, question.model, question.sequence_length):
        return canonical(even, context)
    return canonical(config.replace({"pipeline_layout": text}), context)


Stages = tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """A configuration, all but its layout."""

    question: Question
    config: TrialConfig
    cases: Cases
    limits: MemoryLimits

    def costs(self, layouts: Sequence[Stages]) -> list[tuple[float, float]]:
        """For each layout, by how much its fullest rank exceeds its memory, as a share of it, and the seconds of a step."""
        model, cluster, length = self.question.shape, self.question.cluster, self.question.sequence_length
        written = [self.config.replace({"pipeline_layout": layout_text(stages)}) for stages in layouts]
        laid_out, ranks = tabled([layout_key(config, model, cluster, length) for config in written])
        case_layouts = dataclasses.replace(self.cases.layouts, laid_out=laid_out)
        cases = dataclasses.replace(self.cases, layouts=case_layouts, ranks=ranks)
        usage = memory(cases, self.question.rates, tagged=False)
        beyond = np.maximum(np.maximum(usage.needed / self.limits.device, usage.host / self.limits.host) - 1, 0.0)
        seconds = np.broadcast_to(seconds_of(cases, self.question.rates), len(layouts))
        return list(zip(np.broadcast_to(beyond, len(layouts)).tolist(), seconds.tolist(), strict=True))


def improved(
    question: Question, config: TrialConfig, limits: MemoryLimits, menu: Menu, stages: Sequence[Stage]
) -> Stages | None:
    """The stages after moves that each fit better or, if all fit, take less time: never worse than before. None: they still do
    not fit.

    1. Predict all moves of one layer from a stage to another, and of one more or fewer recomputed layer in a stage.
    2. Take the best, and repeat while it is better.

    Args:
        question: the model, the cluster and the workload.
        config: the rest of the configuration; it recomputes and offloads nothing that its layout does not.
        limits: memory limits of a rank.
        menu: the possible choices.
        stages: where to start.
    """
    written = config.replace({"pipeline_layout": layout_text(stages)})
    cases = cases_of(question.model, question.cluster, question.workload, [written], question.engine, question.arguments)
    if not cases.kinds:
        return tuple(stages)
    pipeline = _Pipeline(question=question, config=config, cases=cases, limits=limits)
    best = tuple(stages)
    (least,) = pipeline.costs([best])
    while moves := list(_moves(best, menu)):
        costs = pipeline.costs(moves)
        index = min(range(len(moves)), key=costs.__getitem__)
        if costs[index] >= (least[0], least[1] * (1 - 1e-6)):
            break  # the remaining moves gain nothing
        best, least = moves[index], costs[index]
    return None if least[0] > 0 else best


def _moves(stages: Stages, menu: Menu) -> Iterator[Stages]:
    several = len(stages) ** 2 <= 1_000  # else layers are moved between neighbours only
    for source, stage in enumerate(stages):
        for target in range(len(stages)) if several else (source - 1, source + 1):
            if stage.layers > 1 and target != source and 0 <= target < len(stages):
                yield _with(stages, {source: _resized(stage, -1), target: _resized(stages[target], 1)})
        for policy in menu.policies:
            if policy == "none" or (stage.recomputed and stage.recompute != policy):
                continue
            for count in (stage.recomputed - 1, stage.recomputed + 1):
                if 0 <= count <= stage.layers:
                    yield _with(stages, {source: _recomputing(stage, policy, count)})


def _with(stages: Stages, changed: dict[int, Stage]) -> Stages:
    return tuple(changed.get(index, stage) for index, stage in enumerate(stages))


def _resized(stage: Stage, more: int) -> Stage:
    """With so many more layers; a stage that recomputes all of them goes on doing so."""
    layers = stage.layers + more
    count = layers if stage.recomputed == stage.layers else min(stage.recomputed, layers)
    return _recomputing(dataclasses.replace(stage, layers=layers), stage.recompute, count)


def _recomputing(stage: Stage, policy: str, count: int) -> Stage:
    return dataclasses.replace(stage, recompute=policy if count else "none", recomputed=count)
