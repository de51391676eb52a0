"""Stages: every layer once, every stage on one rank, and the balanced split as good as any."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.knob_values import KNOBS
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.models.pipeline import (
    FOLDED_SCHEDULES,
    LOOPED_SCHEDULES,
    ONE_STAGE_SCHEDULES,
    ZERO_BUBBLE_SCHEDULES,
    head_in_layers,
    rank_of_stage,
    split_layers,
    stages_of_rank,
)
from search_spaces.trial_config import TrialConfig

LENGTH = 128
MODELS = ("llama-tiny", "gpt2", "mixtral-8x7b", "llama-3-8b")


def spec(name: str, layers: int) -> ModelSpec:
    model = resolve_model(name)
    assert isinstance(model, ModelSpec)
    return dataclasses.replace(model, num_layers=layers)


@st.composite
def pipelines(draw: st.DrawFn) -> TrialConfig:
    """A configuration with a pipeline whose stages a rank the schedule can run."""
    schedule = draw(st.sampled_from(KNOBS["pipeline_schedule"].choices))
    virtual = 1 if schedule in ONE_STAGE_SCHEDULES else 2 if schedule in FOLDED_SCHEDULES else draw(st.integers(1, 4))
    return TrialConfig().replace({
        "pipeline_schedule": schedule,
        "virtual_stages": virtual,
        "pipeline_parallel_size": draw(st.integers(1 if virtual == 1 else 2, 6)),
        "pipeline_split": draw(st.sampled_from(KNOBS["pipeline_split"].choices)),
    })  # fmt: skip


def test_families_name_every_schedule_once() -> None:
    families = (*ONE_STAGE_SCHEDULES, *LOOPED_SCHEDULES, *FOLDED_SCHEDULES)
    assert sorted(families) == sorted(map(str, KNOBS["pipeline_schedule"].choices))
    assert set(ZERO_BUBBLE_SCHEDULES) <= set(families)


@given(pipelines())
def test_every_stage_is_on_one_rank(config: TrialConfig) -> None:
    held = [stages_of_rank(config, rank) for rank in range(config.pipeline_parallel_size)]
    stages = config.pipeline_parallel_size * config.virtual_stages
    assert sorted(stage for mine in held for stage in mine) == list(range(stages))
    assert {len(mine) for mine in held} == {config.virtual_stages}
    assert all(stage in held[rank_of_stage(config, stage)] for stage in range(stages))


def test_a_fold_puts_the_ends_together() -> None:
    config = TrialConfig(pipeline_parallel_size=3, virtual_stages=2, pipeline_schedule="zbv")
    assert [stages_of_rank(config, rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    looped = config.replace({"pipeline_schedule": "interleaved_1f1b"})
    assert [stages_of_rank(looped, rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


@given(pipelines(), st.integers(0, 40), st.sampled_from(MODELS))
def test_every_layer_is_in_one_stage_in_order(config: TrialConfig, further: int, name: str) -> None:
    stages = config.pipeline_parallel_size * config.virtual_stages
    split = split_layers(spec(name, stages + further), config, LENGTH)
    assert len(split) == stages
    assert all(len(layers) >= 1 for layers in split)
    assert [layer for layers in split for layer in layers] == list(range(stages + further))


@given(pipelines(), st.integers(0, 40))
def test_even_stages_differ_by_one_layer_at_most(config: TrialConfig, further: int) -> None:
    stages = config.pipeline_parallel_size * config.virtual_stages
    split = split_layers(spec("gpt2", stages + further), config.replace({"pipeline_split": "even"}), LENGTH)
    counts = [len(layers) for layers in split]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("layers", [4, 5, 7, 10])
def test_no_split_has_a_cheaper_slowest_stage_than_balanced(name: str, stages: int, layers: int) -> None:
    model = spec(name, layers)
    head = head_in_layers(model, LENGTH)

    def slowest(counts: tuple[int, ...]) -> float:
        return max((*counts[:-1], counts[-1] + head))

    split = split_layers(model, TrialConfig(pipeline_parallel_size=stages), LENGTH)
    every = (counts for counts in itertools.product(range(1, layers + 1), repeat=stages) if sum(counts) == layers)
    assert slowest(tuple(map(len, split))) == pytest.approx(min(map(slowest, every)))


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_weighed_by_the_models_own_count_of_flops(name: str) -> None:
    model = resolve_model(name)
    assert isinstance(model, ModelSpec)
    longer = dataclasses.replace(model, num_layers=model.num_layers + 1)
    layer = longer.flops_per_token(LENGTH) - model.flops_per_token(LENGTH)
    table = 6.0 * model.vocab_size * (model.embedding_size or model.hidden_size)
    assert head_in_layers(model, LENGTH) == pytest.approx(table / layer)


def test_a_wide_vocabulary_takes_layers_from_the_last_stage() -> None:
    split = split_layers(spec("gpt2", 12), TrialConfig(pipeline_parallel_size=4), LENGTH)
    counts = [len(layers) for layers in split]
    assert counts[-1] == 1
    assert sum(counts) == 12
