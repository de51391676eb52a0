"""The order in which the winner's pipeline runs a step, taken from the engine, with predicted durations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.explain.evidence import ExplanationEvidence
from autotune.explain.figures.source import FigureSource, FigureUnit, MakeFigure, column, counted, percent, seconds_text, table
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.compute import micro_batch
from autotune.prediction.equations.step import hop_seconds
from autotune.prediction.planning.question import Question
from autotune.wire.figures import Axis, Figure
from executor.parallel.schedule import Action, ActionKind, actions_of
from search_spaces.models.pipeline import stages_of_model, stages_of_rank
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Predicted seconds of each stage for one micro-batch."""

    seconds: Mapping[ActionKind, Sequence[float]]
    hop: float
    """Seconds to send a stage's output to the next stage on another rank."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An action with its times, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


def pipeline_schedule(source: FigureSource, figure: MakeFigure) -> Figure:
    """Drawn if the winner has a pipeline. Data-parallel traffic, the update and offloading come after it and are not drawn."""
    evidence = source.evidence
    if evidence is None:
        return figure(summary=source.lacking())
    config, question = evidence.config, evidence.question
    if config.pipeline_parallel_size == 1:
        return figure(summary="The best has no pipeline: every rank holds all layers.")
    if question is None:
        return figure(summary=source.unpredicted)
    if question.engine != "native":
        summary = f"The pipeline schedule of the engine {question.engine} is not known."
        return figure(summary=summary)
    return _drawn(figure, evidence, config, question)


def _drawn(figure: MakeFigure, evidence: ExplanationEvidence, config: TrialConfig, question: Question) -> Figure:
    request = evidence.session.request
    batches = config.gradient_accumulation_steps(request.global_batch_size, evidence.session.world_size)
    layers = stages_of_model(question.model, config, question.sequence_length)
    schedule = place(actions_of(config, batches), durations_of(config, question, [len(stage) for stage in layers]))
    stages = {rank: list(stages_of_rank(config, rank)) for rank in range(config.pipeline_parallel_size)}
    whole = max(scheduled.end for scheduled in schedule)
    busy = {
        rank: math.fsum(scheduled.end - scheduled.start for scheduled in schedule if scheduled.rank == rank) for rank in stages
    }
    # At most about 1,500 actions are drawn; if there are more, those of the first micro-batches.
    shown = max(1_500 * batches // len(schedule), 1)
    drawn = [scheduled for scheduled in schedule if scheduled.action.micro_batch < shown]
    actions = table(
        "actions",
        "what a rank computes",
        [
            column("rank", "pipeline rank", [scheduled.rank for scheduled in drawn]),
            column("stage", "stage", [scheduled.action.stage for scheduled in drawn]),
            column("micro_batch", "micro-batch", [scheduled.action.micro_batch for scheduled in drawn]),
            column("kind", "what", [scheduled.action.kind for scheduled in drawn]),
            column("start", "from", [scheduled.start for scheduled in drawn], FigureUnit.SECONDS),
            column("end", "to", [scheduled.end for scheduled in drawn], FigureUnit.SECONDS),
        ],
    )
    ranks = table(
        "ranks",
        "a rank of the pipeline",
        [
            column("rank", "pipeline rank", stages),
            column("stages", "stages", [", ".join(map(str, rank_stages)) for rank_stages in stages.values()]),
            column("layers", "layers", [sum(len(layers[stage]) for stage in rank_stages) for rank_stages in stages.values()]),
            column("busy", "computes", busy.values(), FigureUnit.SECONDS),
            column("idle", "waits", [whole - seconds for seconds in busy.values()], FigureUnit.SECONDS),
            column("idle_share", "waits", [1 - seconds / whole for seconds in busy.values()], FigureUnit.SHARE),
        ],
    )
    idle = 1 - math.fsum(busy.values()) / (whole * len(busy))
    summary = (
        f"{config.pipeline_schedule} over {counted(len(layers), 'stage')} on {counted(len(stages), 'rank')} with "
        f"{counted(batches, 'micro-batch').replace('batchs', 'batches')}: {seconds_text(whole)} predicted, of which ranks wait "
        f"{percent(idle)} on average."
    )
    notes = [f"The order is the one that the engine runs; durations are predicted by {question.calibration_source}."]
    if shown < batches:
        notes.append(f"The first {shown:,} of {batches:,} micro-batches are drawn; compute and wait times cover all.")
    return figure(
        summary=summary,
        x=Axis(title="since the step began", unit=FigureUnit.SECONDS, column="start"),
        y=Axis(title="pipeline rank", column="rank"),
        tables=(actions, ranks),
        notes=tuple(notes),
    )


def durations_of(config: TrialConfig, question: Question, layers: Sequence[int]) -> StageSeconds:
    """By the equations of a step: forward, and backward in a fixed ratio to it, with recomputation.

    Where a schedule computes the gradients of inputs and of weights separately, each takes half of backward. Recomputation
    comes before the first of them.
    """
    cases = cases_of(question.model, question.cluster, question.workload, [config], question.engine)
    batch, ratio = micro_batch(cases, question.rates), question.rates.backward_ratio
    # The share of the forward pass that backward recomputes.
    recomputed = {"none": 0.0, "selective": 0.25, "full": 1.0}[config.activation_checkpointing] / config.checkpoint_every_k
    layer = float((batch.layer + batch.layer_communication)[0]) / (1 + ratio + recomputed)
    head = float((batch.head + batch.head_communication)[0]) / (1 + ratio)
    last = len(layers) - 1
    forward = [count * layer + head * (stage == last) for stage, count in enumerate(layers)]
    rerun = [count * layer * recomputed for count in layers]
    halves = [seconds * ratio / 2 for seconds in forward]
    return StageSeconds(
        {
            ActionKind.FORWARD: forward,
            ActionKind.BACKWARD: [2 * half + extra for half, extra in zip(halves, rerun, strict=True)],
            ActionKind.INPUT_GRADIENT: [half + extra for half, extra in zip(halves, rerun, strict=True)],
            ActionKind.WEIGHT_GRADIENT: halves,
        },
        float(hop_seconds(cases, question.rates)[0]),
    )


def place(orders: Sequence[Sequence[Action]], durations: StageSeconds) -> list[Placed]:
    """Schedule each action as soon as its rank has finished the previous one and its inputs have arrived.

    Raises:
        ValueError: the orders deadlock.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    ends: dict[tuple[int, str, int], float] = {}
    clock, nexts = [0.0] * len(orders), [0] * len(orders)
    schedule: list[Placed] = []
    remaining = sum(map(len, orders))
    while remaining:
        before = remaining
        for rank, order in enumerate(orders):
            while nexts[rank] < len(order) and (ready := _ready(order[nexts[rank]], ends, rank_of, durations.hop)) is not None:
                action = order[nexts[rank]]
                start = max(clock[rank], ready)
                clock[rank] = start + durations.seconds[action.kind][action.stage]
                ends[action.stage, _made(action.kind), action.micro_batch] = clock[rank]
                schedule.append(Placed(rank, action, start, clock[rank]))
                nexts[rank] += 1
                remaining -= 1
        if remaining == before:
            raise ValueError("the orders of the ranks wait for each other")
    return schedule


def _ready(action: Action, ends: Mapping[tuple[int, str, int], float], rank_of: Mapping[int, int], hop: float) -> float | None:
    """The time at which an action's inputs have arrived; None: not yet."""
    stage, batch = action.stage, action.micro_batch
    match action.kind:
        case ActionKind.FORWARD:
            needed = [(stage - 1, "forward")] if stage else []
        case ActionKind.WEIGHT_GRADIENT:
            needed = [(stage, "gradient")]
        case _:
            needed = [(stage, "forward"), *([(stage + 1, "gradient")] if stage + 1 in rank_of else [])]
    arrivals = [(ends.get((of, output, batch)), of) for of, output in needed]
    if any(end is None for end, _ in arrivals):
        return None
    return max((end + hop * (rank_of[of] != rank_of[stage]) for end, of in arrivals if end is not None), default=0.0)


def _made(kind: ActionKind) -> str:
    """The output that other actions wait for: hidden states, gradients of inputs."""
    return {ActionKind.FORWARD: "forward", ActionKind.WEIGHT_GRADIENT: "weights"}.get(kind, "gradient")
