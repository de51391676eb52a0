"""The integer program against every choice that there is, on pipelines small enough to list them; and how soon it ends."""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import predict, seconds_of
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.memory_fit import MemoryLimits, memory_limits_of
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.question_space import space_of
from autotune.prediction.planning.solved_layouts import solved_layouts
from autotune.prediction.planning.stage_program import Menu, solved
from search_spaces.models.pipeline import Stage, layout_text, split_layers
from search_spaces.rules.table import check_config
from search_spaces.trial_config import TrialConfig


def asked(model: str, layers: int, cluster: str = "dgx-h100", **fields: Any) -> Question:
    given: dict[str, Any] = {"global_batch_size": 64, "sequence_length": 2048} | fields
    shape = dataclasses.replace(model_of(model, None, None, None), num_layers=layers)
    return question_of(shape, cluster_of(cluster, None, None), **given)


def every_stage(layers: int, menu: Menu) -> Iterator[Stage]:
    for policy, offloads in itertools.product(menu.policies, (False, True) if menu.offloads else (False,)):
        for again in range(1, layers + 1) if policy != "none" else (0,):
            yield Stage(layers=layers, recompute=policy, recomputed=again, offloads=offloads)


def every_layout(layers: int, ranks: int, menu: Menu) -> Iterator[str]:
    for counts in itertools.product(range(1, layers + 1), repeat=ranks):
        if sum(counts) == layers:
            for stages in itertools.product(*(tuple(every_stage(count, menu)) for count in counts)):
                yield layout_text(stages)


def brute(question: Question, config: TrialConfig, limits: MemoryLimits, menu: Menu) -> float:
    """Seconds of the fastest layout that fits; infinite: none does."""
    layouts = every_layout(question.model.num_layers, config.pipeline_parallel_size, menu)
    configs = [config.replace({"pipeline_layout": layout}) for layout in layouts]
    cases = cases_of(question.model, question.cluster, question.workload, configs, question.engine)
    held = memory(cases, question.rates)
    fits = limits.holds(held.needed, held.host)
    return float(np.where(fits, seconds_of(cases, question.rates), np.inf).min())


def seconds(question: Question, config: TrialConfig) -> float:
    return float(
        predict(
            cases_of(question.model, question.cluster, question.workload, [config], question.engine), question.rates
        ).seconds[0]
    )


def written(question: Question, config: TrialConfig) -> TrialConfig:
    """The same, its stages written out where a knob says what they are."""
    counts = [len(layers) for layers in split_layers(question.model, config, question.sequence_length)]
    return config.replace({"pipeline_layout": config.pipeline_layout or "-".join(map(str, counts))})


@st.composite
def instances(draw: st.DrawFn) -> tuple[Question, TrialConfig, MemoryLimits, Menu]:
    """A pipeline whose layouts can be listed, and memory that holds some of them."""
    ranks = draw(st.sampled_from([2, 4]))
    menu = draw(st.sampled_from(
        [Menu(), Menu(policies=("none", "full"), offloads=True)] if ranks == 2 else [Menu(policies=("none", "selective"))]
    ))  # fmt: skip
    question = asked(
        draw(st.sampled_from(["llama-3-8b", "gpt2", "mixtral-8x7b"])), draw(st.integers(ranks, 7 if ranks == 2 else 6)),
        sequence_length=draw(st.sampled_from([512, 1024])),
    )  # fmt: skip
    config = TrialConfig(
        precision="bf16", pipeline_parallel_size=ranks, zero_stage=draw(st.sampled_from([1, 2, 3])),
        micro_batch_size=draw(st.sampled_from([1, 2, 4])), pipeline_schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
    )  # fmt: skip
    (even,) = estimates(question, [config])
    limit = even.fullest.needed * draw(st.floats(0.7, 1.2))
    return question, config, MemoryLimits(device=limit, host=1e15), menu


@pytest.mark.prove
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(instances())
def test_no_layout_that_fits_is_faster(instance: tuple[Question, TrialConfig, MemoryLimits, Menu]) -> None:
    question, config, limits, menu = instance
    answer, best = solved(question, config, limits, menu), brute(question, config, limits, menu)
    assert (answer is None) == np.isinf(best)
    assume(answer is not None)
    assert answer is not None
    assert seconds(question, written(question, answer)) == pytest.approx(best, rel=1e-7)
    held = memory(cases_of(question.model, question.cluster, question.workload, [answer], "native"), question.rates)
    assert held.needed[0] <= limits.device * (1 + 1e-9)
    assert check_config(answer, space_of(question).context) == []


def test_memory_decides_which_stages_compute_again() -> None:
    """The first rank of 1F1B holds the most micro-batches: it alone computes again where there is a little too little."""
    question = asked("llama-3-8b", 8, sequence_length=8192)
    config = TrialConfig(precision="bf16", pipeline_parallel_size=4, zero_stage=1)
    plenty = MemoryLimits(device=1e15, host=1e15)
    free = solved(question, config, plenty)
    assert free is not None
    assert "s" not in free.pipeline_layout
    needed = estimates(question, [config.replace({"pipeline_layout": "2-2-2-2"})])[0].ranks
    tight = MemoryLimits(device=0.7 * needed[0].needed + 0.3 * needed[1].needed, host=1e15)
    answer = solved(question, config, tight)
    assert answer is not None
    told = estimates(question, [answer, config.replace({"activation_checkpointing": "selective"})])
    assert answer.pipeline_layout.split("-")[0] != "2"
    assert told[0].step_seconds.mean < told[1].step_seconds.mean


def test_what_every_stage_does_is_said_by_the_knobs() -> None:
    question = asked("llama-3-8b", 8)
    config = TrialConfig(precision="bf16", pipeline_parallel_size=4, zero_stage=1)
    only_full = Menu(policies=("full",), offloads=False)
    answer = solved(question, config, MemoryLimits(device=1e15, host=1e15), only_full)
    assert answer is not None
    assert (answer.activation_checkpointing, "f" in answer.pipeline_layout) in (("full", False), ("none", True))
    assert check_config(answer, space_of(question).context) == []


def test_nothing_fits_where_nothing_can() -> None:
    question = asked("llama-3-8b", 8)
    config = TrialConfig(precision="bf16", pipeline_parallel_size=4)
    assert solved(question, config, MemoryLimits(device=1e6, host=1e15)) is None
    assert solved(question, config.replace({"pipeline_parallel_size": 1}), memory_limits_of(question)) is None


@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved_1f1b", 2), ("zbv", 2), ("looped_bfs", 3)])
def test_ranks_of_several_stages_share_their_layers_out(schedule: str, virtual: int) -> None:
    question = asked("llama-3-8b", 32, sequence_length=8192)
    config = TrialConfig(
        precision="bf16", pipeline_parallel_size=4, virtual_stages=virtual, pipeline_schedule=schedule, zero_stage=1
    )
    answer = solved(question, config, memory_limits_of(question))
    assert answer is not None
    assert check_config(answer, space_of(question).context) == []
    even = [config.replace({"pipeline_split": split, "activation_checkpointing": policy})
            for split in ("even", "balanced") for policy in ("none", "selective", "full")]  # fmt: skip
    told = [told for told in estimates(question, even) if told.fit_probability >= 0.95]
    assert seconds(question, answer) <= min(item.step_seconds.mean for item in told) * (1 + 1e-9)


def test_80_layers_on_16_stages_end_in_10_seconds() -> None:
    question = asked("llama-3-70b", 80, "dgx-h100:16", global_batch_size=128, sequence_length=8192)
    config = TrialConfig(
        precision="bf16", tensor_parallel_size=4, sequence_parallel=True, pipeline_parallel_size=16, zero_stage=1
    )
    began = time.process_time()  # of computing: neighbours' turns are not in it
    answer = solved(question, config, memory_limits_of(question), Menu(offloads=True))
    assert time.process_time() - began < 10
    assert answer is not None
    assert answer.pipeline_layout


def test_a_space_gets_the_layouts_that_beat_even_stages() -> None:
    question = asked("llama-3-8b", 32, sequence_length=8192, space="3d", pins={
        "pipeline_layout": "solved", "pipeline_parallel_size": "1,8", "virtual_stages": 1, "tensor_parallel_size": 1,
    })  # fmt: skip
    space = space_of(question)
    even, *layouts = space.domains["pipeline_layout"]
    assert even == ""
    assert layouts
    assert layouts == [
        *solved_layouts(dataclasses.replace(space, domains=space.domains | {"pipeline_layout": ("",)}), "native")
    ]
    with_layout = [config for config in space.enumerate() if config.pipeline_layout == layouts[0]]
    assert with_layout
    assert all(config.activation_checkpointing == "none" for config in with_layout if "s" in layouts[0] or "f" in layouts[0])
