"""Pipeline layouts offered besides the even ones: solutions of the integer program for the most promising pipelines."""

import dataclasses
from collections.abc import Iterator

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.planning.memory_fit import MemoryLimits, memory_limits_of
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.scan import Bounds, scan
from autotune.prediction.planning.stage_program import Menu, solved
from search_spaces.errors import SpaceTooLargeError
from search_spaces.models.model import ModelSpec
from search_spaces.rules.table import check_config
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

WEIGHED = (
    "pipeline_parallel_size", "pipeline_schedule", "virtual_stages", "pipeline_split", "tensor_parallel_size",
    "context_parallel_size", "expert_parallel_size", "sequence_parallel", "micro_batch_size", "zero_stage",
    "activation_checkpointing", "offload_optimizer",
)  # fmt: skip
"""Knobs that are compared to find the pipelines worth solving; the others have the base's values."""


def solved_layouts(space: SearchSpace, engine: str, rates: Coefficients | None = None) -> tuple[str, ...]:
    """Values for `pipeline_layout`, by predicted time of their pipelines; empty if none beats the even ones.

    Args:
        space: the space searched besides layouts.
        engine: the engine.
        rates: coefficients for the cluster; None: the shipped ones.
    """
    model = space.model
    if not isinstance(model, ModelSpec) or (space.capability and space.capability.honoured("pipeline_layout") is not None):
        return ()
    question = Question(
        model=model, cluster=space.cluster, engine=engine, global_batch_size=space.workload.global_batch_size,
        sequence_length=space.workload.sequence_length, coefficients=rates, training_steps=space.workload.training_steps,
        document_lengths=space.workload.document_lengths,
    )  # fmt: skip
    limits = memory_limits_of(question)
    policies = space.domains.get("activation_checkpointing", (space.base.activation_checkpointing,))
    menu = Menu(policies=tuple(dict.fromkeys(("none", *(str(policy) for policy in policies)))))
    solutions: list[tuple[float, str]] = []
    # Number of layouts added to a space: each is combined with every other knob of its pipelines.
    most = 6
    for seconds, config in sorted(_pipelines(question, space, limits), key=lambda item: item[0])[: most * 2]:
        answer = solved(question, config, limits, menu)
        if answer is None or not answer.pipeline_layout or check_config(answer, space.context):
            continue
        predicted = float(seconds_of(cases_of(model, space.cluster, space.workload, [answer], engine), question.rates)[0])
        if predicted < seconds * (1 - 0.001):  # else a tie with the best even layout
            solutions.append((predicted, answer.pipeline_layout))
    return tuple(dict.fromkeys(layout for _, layout in sorted(solutions)))[:most]


def _pipelines(question: Question, space: SearchSpace, limits: MemoryLimits) -> Iterator[tuple[float, TrialConfig]]:
    """The best two for each number of pipeline ranks, with the step seconds of even stages."""
    weighed = {name: values for name, values in space.domains.items() if name in WEIGHED}
    for ranks in space.domains.get("pipeline_parallel_size", (space.base.pipeline_parallel_size,)):
        if int(ranks) == 1:
            continue
        part = dataclasses.replace(
            space, domains=weighed | {"pipeline_parallel_size": (ranks,)}, base=space.base.replace({"pipeline_layout": ""})
        )
        if part.is_empty():
            continue
        try:
            # A larger space gets no layouts, to save time.
            scanned = scan(question, part, limits, slowest=None, bounds=Bounds(configurations=250_000))
        except SpaceTooLargeError:
            return
        distinct: dict[TrialConfig, float] = {}
        for leader in scanned.leaders:
            chosen = ("pipeline_split", "activation_checkpointing", "checkpoint_every_k")  # by the program itself
            alike = leader.config.replace({name: getattr(space.base, name) for name in chosen})
            if len(distinct) == 2 and alike not in distinct:
                break
            if alike not in distinct:
                distinct[alike] = leader.seconds
                yield leader.seconds, leader.config
