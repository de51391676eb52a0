"""Layouts that are written out are predicted as the knobs that say the same, rank by rank, and on a grid as one by one."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.cases.grid import ConfigGrid
from autotune.prediction.cases.grid_cases import GridCases
from autotune.prediction.equations.step import StepPrediction, predict
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.question_space import space_of
from search_spaces.models.pipeline import Stage, layout_text, split_layers
from search_spaces.trial_config import TrialConfig

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zbv", 2))


def asked(**fields: Any) -> Question:
    given: dict[str, Any] = {"global_batch_size": 64, "sequence_length": 4096} | fields
    return question_of(model_of("llama-3-8b", None, None, None), cluster_of("dgx-h100", None, None), **given)


def predicted(configs: list[TrialConfig], question: Question | None = None) -> StepPrediction:
    question = question or asked()
    return predict(cases_of(question.model, question.cluster, question.workload, configs, "native"), question.rates)


def written(config: TrialConfig, policy: str = "none", offloads: bool = False) -> TrialConfig:
    """The same stages, written out with a mark on each."""
    stages = [
        Stage(
            layers=len(layers), recompute=policy, recomputed=len(layers) if policy != "none" else 0, offloads=offloads
        )
        for layers in split_layers(asked().model, config, 4096)
    ]  # fmt: skip
    knobs = {"activation_checkpointing": "none"} if policy != "none" else {}
    return config.replace({"pipeline_layout": layout_text(stages), **knobs})


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_a_layout_is_predicted_as_the_knobs_that_say_the_same(schedule: str, virtual: int, policy: str) -> None:
    knobs = {"precision": "bf16", "pipeline_parallel_size": 4, "pipeline_schedule": schedule, "virtual_stages": virtual}
    base = TrialConfig().replace({**knobs, "activation_checkpointing": policy, "pipeline_split": "even"})
    both = predicted([base, written(base), written(base, policy)])
    np.testing.assert_allclose(both.seconds, both.seconds[0], rtol=1e-9)
    np.testing.assert_allclose(both.memory.total, both.memory.total[0], rtol=1e-9)


def test_offloading_every_stage_is_offloading() -> None:
    base = TrialConfig(precision="bf16", pipeline_parallel_size=4, zero_stage=1, pipeline_split="even")
    both = predicted([base.replace({"offload_optimizer": "cpu"}), written(base, offloads=True)])
    np.testing.assert_allclose(both.seconds, both.seconds[0], rtol=1e-9)
    np.testing.assert_allclose(both.memory.total, both.memory.total[0], rtol=1e-9)
    np.testing.assert_allclose(both.memory.host, both.memory.host[0], rtol=1e-9)


def test_a_mark_changes_its_own_rank_alone() -> None:
    question, base = asked(), TrialConfig(precision="bf16", pipeline_parallel_size=4, zero_stage=1)
    plain, marked = estimates(question, [base.replace({"pipeline_layout": text}) for text in ("9-9-8-6", "9-9s4-8-6o")])
    assert [rank.layers for rank in marked.ranks] == [9, 9, 8, 6]
    fewer = [after.total < before.total for before, after in zip(plain.ranks, marked.ranks, strict=True)]
    assert fewer == [False, True, False, True]
    assert marked.ranks[3].by_tag["optimizer_state"] == 0.0
    assert marked.host_memory_bytes > plain.host_memory_bytes == 0.0
    assert marked.step_seconds.mean > plain.step_seconds.mean


def test_the_fullest_rank_is_told_wherever_it_is() -> None:
    (estimate,) = estimates(asked(), [TrialConfig(precision="bf16", pipeline_parallel_size=4, pipeline_layout="2-2-26-2")])
    assert estimate.fullest.pipeline_rank == 2
    held = predicted([estimate.config]).memory
    assert held.total[0] == pytest.approx(estimate.fullest.total)
    assert held.stage[0] == 2


def test_a_stage_more_than_its_share_is_slower_by_its_layers() -> None:
    base = TrialConfig(precision="bf16", pipeline_parallel_size=4)
    seconds = predicted([base.replace({"pipeline_layout": text}) for text in ("9-9-8-6", "14-8-6-4")]).seconds
    assert 1.2 < seconds[1] / seconds[0] < 14 / 9


@pytest.mark.parametrize("pins", [{}, {"pipeline_parallel_size": 4, "micro_batch_size": 1, "zero_stage": "0,1"}])
def test_a_grid_with_layouts_is_what_its_configurations_are(pins: dict[str, Any]) -> None:
    question = asked(space="3d", pins={
        "pipeline_layout": ",9-9-8-6,9f-9s2-8-6,1-2-3-4-5-6-7-4,4f-4-4-4-5-5-5-1",
        "pipeline_schedule": "1f1b,interleaved_1f1b,zbv",
        "virtual_stages": "1,2", "zero_stage": "0,2", "tensor_parallel_size": "1,2", **pins,
    })  # fmt: skip
    space = space_of(question)
    grid = ConfigGrid(space)
    maker, seen = GridCases(space, question.model, "native", grid), 0
    for rows in grid.blocks(4000):
        configs = list(grid.configs(rows))
        seen += sum(config.pipeline_layout != "" for config in configs)
        ours, theirs = predict(maker.of(rows), question.rates), predicted(configs, question)
        shape = (rows.count, grid.sides.count)
        for one, other in [(ours.seconds, theirs.seconds), (ours.memory.total, theirs.memory.total)]:
            np.testing.assert_allclose(np.broadcast_to(one, shape).ravel(), np.broadcast_to(other, len(configs)), rtol=1e-12)
    assert seen > 20


def test_layouts_are_predicted_beside_even_stages_as_without_them() -> None:
    base = TrialConfig(precision="bf16", pipeline_parallel_size=4)
    mixed = [base, base.replace({"pipeline_layout": "9-9-8-6"}), dataclasses.replace(base, zero_stage=1)]
    together = predicted(mixed).seconds
    np.testing.assert_allclose(together, [float(predicted([config]).seconds[0]) for config in mixed], rtol=1e-12)
