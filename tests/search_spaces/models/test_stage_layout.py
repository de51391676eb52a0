"""Layouts of pipeline stages: one spelling each, what they say of a stage, and how they join a space."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.clusters.presets import resolve_cluster
from search_spaces.errors import IllegalConfigError, KnobValueError
from search_spaces.knob_values import check_value
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.models.pipeline import Stage, layout_text, parse_layout, recomputed_layers, split_layers, stage_config
from search_spaces.space import SearchSpace
from search_spaces.spaces import parse_pins, resolve_space
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

WORKLOAD = Workload(global_batch_size=32, sequence_length=128)


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    layers, policy = draw(st.integers(1, 99)), draw(st.sampled_from(["none", "selective", "full"]))
    again = draw(st.integers(1, layers)) if policy != "none" else 0
    return Stage(layers=layers, recompute=policy, recomputed=again, offloads=draw(st.booleans()))


@given(st.lists(stages(), min_size=1, max_size=8))
def test_a_layout_is_read_as_it_is_written(layout: list[Stage]) -> None:
    text = layout_text(layout)
    assert parse_layout(text) == tuple(layout)
    assert check_value("pipeline_layout", text) == text


def test_one_layout_has_one_spelling() -> None:
    assert check_value("pipeline_layout", "7f7-6s2o") == "7f-6s2o"
    assert check_value("pipeline_layout", "") == ""


@pytest.mark.parametrize("text", ["6,7", "6-", "-6", "0-6", "06-6", "6F-6", "6x-6", "6 - 6", "6f0-6", "6of-6", "solved"])
def test_what_is_no_layout_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(KnobValueError, match=r"pipeline_layout: .* is not a stage; write a count of layers for each stage"):
        check_value("pipeline_layout", text)


def test_more_layers_again_than_there_are_are_refused() -> None:
    with pytest.raises(KnobValueError, match="'6f7' in '6f7-1' recomputes 7 layers and has 6; give at most"):
        check_value("pipeline_layout", "6f7-1")


def test_a_stage_has_the_layers_that_its_layout_says() -> None:
    model = resolve_model("gpt2")
    assert isinstance(model, ModelSpec)
    config = TrialConfig(pipeline_parallel_size=3, pipeline_layout="2-9f-1s")
    assert split_layers(model, config, 128) == (range(2), range(2, 11), range(11, 12))


def test_marks_stand_in_the_place_of_the_knobs() -> None:
    config = TrialConfig(pipeline_layout="6f2-6-4s", activation_checkpointing="full", checkpoint_every_k=3)
    chosen = [recomputed_layers(config, stage, count) for stage, count in enumerate((6, 6, 4))]
    assert [(kind, [*layers]) for kind, layers in chosen] == [("full", [0, 1]), ("none", []), ("selective", [0, 1, 2, 3])]
    plain = config.replace({"pipeline_layout": "7-6-3"})
    assert [*recomputed_layers(plain, 0, 7)[1]] == [0, 3, 6]


def test_a_stage_offloads_all_of_its_optimizer_state_or_none() -> None:
    config = TrialConfig(pipeline_layout="6o-6", offload_ratio=0.5)
    told = [stage_config(config, stage) for stage in range(2)]
    assert [(own.offload_optimizer, own.offload_ratio) for own in told] == [("cpu", 1.0), ("none", 1.0)]
    knob = config.replace({"pipeline_layout": "7-5", "offload_optimizer": "cpu"})
    assert stage_config(knob, 1) is knob


def test_configurations_from_before_keep_their_hash() -> None:
    assert "pipeline_layout" not in TrialConfig(pipeline_parallel_size=2).values()
    assert TrialConfig(pipeline_layout="1-2").values()["pipeline_layout"] == "1-2"


def full_space(**more: object) -> SearchSpace:
    return resolve_space("full", resolve_model("llama-tiny"), resolve_cluster("dgx-a100"), WORKLOAD, **more)  # type: ignore[arg-type]


def test_what_is_proposed_joins_the_even_stages() -> None:
    asked: list[SearchSpace] = []

    def propose(space: SearchSpace) -> tuple[str, ...]:
        asked.append(space)
        return ("1-3", "1f-3")

    space = full_space(layouts=propose)
    assert space.domains["pipeline_layout"] == ("", "1-3", "1f-3")
    assert asked[0].domains["pipeline_layout"] == ("",)
    assert full_space().domains["pipeline_layout"] == ("",)


def test_layouts_that_a_user_lists_are_searched_as_they_are() -> None:
    space = full_space(pins=parse_pins(["pipeline_layout=,3-1", "pipeline_parallel_size=2"]), layouts=lambda _: ("1-3",))
    assert space.domains["pipeline_layout"] == ("", "3-1")
    marked = dataclasses.replace(space, domains={"activation_checkpointing": ("none", "full")})
    one = marked.canonical(TrialConfig(pipeline_parallel_size=2, pipeline_layout="3f-1", activation_checkpointing="full"))
    assert one.activation_checkpointing == "none"


def test_a_layout_that_fits_no_pipeline_is_told_with_its_rule() -> None:
    alone = {"pipeline_parallel_size": 2, "virtual_stages": 1, "tensor_parallel_size": 1, "pipeline_schedule": "1f1b"}
    with pytest.raises(IllegalConfigError, match=r"pipeline-layout: .*pipeline_layout=3-2 has 5 layers, and llama-tiny has 4"):
        full_space(pins={"pipeline_layout": "3-2", **alone})
