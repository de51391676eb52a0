"""The lower bound of the states: closed forms, and that dividing more never needs more."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.capability import Capability
from search_spaces.models.command import CommandModel
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel
from search_spaces.training.states import states_lower_bound_bytes
from search_spaces.trial_config import TrialConfig

MODEL = resolve_model("llama-tiny")
COUNT = MODEL.parameter_count
BOTH = Capability(engine="both", knobs={}, keeps_copy_beside_gradients=True)


@pytest.mark.parametrize(
    ("precision", "stage", "per_parameter"),
    [
        ("fp32", 0, 16),
        ("fp64", 0, 32),
        ("bf16", 0, 18),
        ("fp32", 1, 4 + 16 / 4),
        ("fp32", 2, 4 + 16 / 4),
        ("bf16", 2, 2 + 16 / 4),
        ("fp64", 2, 8 + 32 / 4),
        ("fp32", 3, 16 / 4),
        ("bf16", 3, 16 / 4),
    ],
)
def test_closed_form_on_four_ranks(precision: str, stage: int, per_parameter: float) -> None:
    config = TrialConfig(precision=precision, zero_stage=stage)
    assert states_lower_bound_bytes(config, MODEL, 4, BOTH) == int(COUNT * per_parameter)


@pytest.mark.parametrize(
    ("precision", "stage", "per_parameter"),
    [
        ("fp32", 0, 16),
        ("bf16", 0, 16),
        ("fp32", 2, 4 + 12 / 4),
        ("bf16", 2, 2 + 12 / 4),
        ("bf16", 3, 16 / 4),
    ],
)
def test_an_engine_that_drops_the_copy_before_the_gradients_are_whole(precision: str, stage: int, per_parameter: float) -> None:
    config = TrialConfig(precision=precision, zero_stage=stage)
    assert states_lower_bound_bytes(config, MODEL, 4) == int(COUNT * per_parameter)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_have_all_that_is_common_and_their_own_experts(ranks: int) -> None:
    model = resolve_model("mixtral-8x7b")
    own = model.parameter_count - model.expert_parameters * (1 - 1 / ranks)
    share = model.parameter_count / 8  # whatever ranks divide the experts: as many fewer hold the same
    expected = [16 * own, 4 * own + 16 * share, 16 * share]
    for stage, size in zip((0, 1, 3), expected, strict=True):
        config = TrialConfig(zero_stage=stage, expert_parallel_size=ranks)
        assert states_lower_bound_bytes(config, model, 8, BOTH) == pytest.approx(size)


@pytest.mark.parametrize(("slices", "ranks"), [(1, 1), (1, 8), (2, 2), (2, 4)])
def test_experts_are_divided_by_other_ranks_than_the_rest(slices: int, ranks: int) -> None:
    """Eight tensor ranks and no data ranks: states of experts are sharded nevertheless, over those with the same part."""
    model = resolve_model("mixtral-8x7b")
    common, experts = (model.parameter_count - model.expert_parameters) / 8, model.expert_parameters
    own, share = experts / (slices * ranks), experts / 8
    expected = [16 * (common + own), 4 * (common + own) + 12 * (common + share) + 4 * (common + share), 16 * (common + share)]
    for stage, size in zip((0, 1, 3), expected, strict=True):
        config = TrialConfig(
            zero_stage=stage, tensor_parallel_size=8, expert_parallel_size=ranks, expert_tensor_parallel_size=slices
        )
        if stage == 1 and own == share:
            size = 16 * (common + share)  # nothing is sharded: the master copy is the parameters
        assert states_lower_bound_bytes(config, model, 8, BOTH) == pytest.approx(size)


def test_experts_are_most_of_a_mixture() -> None:
    model = resolve_model("mixtral-8x7b")
    assert model.expert_parameters == 32 * 8 * 3 * 4096 * 14336
    assert MODEL.expert_parameters == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_one_rank_no_stage_needs_more(stage: int) -> None:
    assert states_lower_bound_bytes(TrialConfig(zero_stage=stage), MODEL, 1) == 16 * COUNT


def test_model_parallelism_and_offload_divide() -> None:
    whole = states_lower_bound_bytes(TrialConfig(), MODEL, 4)
    assert states_lower_bound_bytes(TrialConfig(tensor_parallel_size=2), MODEL, 4) == whole // 2
    assert states_lower_bound_bytes(TrialConfig(pipeline_parallel_size=2), MODEL, 4) == whole // 2


@pytest.mark.parametrize(
    ("stage", "changes", "per_parameter"),
    [
        (3, {"offload_optimizer": "cpu"}, 2 / 4),
        (3, {"offload_optimizer": "cpu", "offload_ratio": 0.5}, (0.5 * 16 + 0.5 * 2) / 4),
        (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}, 0),
        (3, {"offload_param": "cpu"}, 12 / 4),
        (1, {"offload_optimizer": "cpu"}, 2),
        (2, {"offload_optimizer": "cpu", "offload_ratio": 0.5}, 2 + 0.5 * 16 / 4),
    ],
)
def test_what_is_offloaded_does_not_count(stage: int, changes: dict[str, Any], per_parameter: float) -> None:
    config = TrialConfig(zero_stage=stage, precision="bf16").replace(changes)
    assert states_lower_bound_bytes(config, MODEL, 4, BOTH) == int(COUNT * per_parameter)


def test_a_small_shard_group_divides_less() -> None:
    config = TrialConfig(zero_stage=3, hsdp_shard_size=2)
    assert states_lower_bound_bytes(config, MODEL, 8, BOTH) == 8 * COUNT
    near = Capability(engine="near", knobs={}, divides_states_over_all_ranks=True)
    assert states_lower_bound_bytes(config, MODEL, 8, near) == states_lower_bound_bytes(config, MODEL, 8) == 2 * COUNT


def test_frozen_parameters_have_no_optimizer_state() -> None:
    model = FactoryModel(reference="m:f", parameter_count=1000, frozen_parameter_count=900)
    assert states_lower_bound_bytes(TrialConfig(), model, 1) == 100 * 16 + 900 * 4


def test_a_users_module_is_divided_like_any_other_and_of_a_script_nothing_is_certain() -> None:
    model = FactoryModel(reference="m:f", parameter_count=1000, tensor_divisor=2)
    assert states_lower_bound_bytes(TrialConfig(tensor_parallel_size=2), model, 2) == 500 * 16
    script = CommandModel(arguments=("python", "train.py"), parameter_count=10**12)
    assert states_lower_bound_bytes(TrialConfig(), script, 2) == 0


@given(st.sampled_from(["fp32", "bf16", "fp16", "fp64"]), st.integers(1, 64))
def test_a_higher_stage_never_needs_more(precision: str, world: int) -> None:
    configs = [TrialConfig(precision=precision, zero_stage=stage) for stage in (1, 2, 3)]
    for engine in (None, BOTH):
        bounds = [states_lower_bound_bytes(config, MODEL, world, engine) for config in configs]
        assert bounds == sorted(bounds, reverse=True)


@given(
    st.sampled_from(["fp32", "bf16", "fp16", "fp64"]), st.sampled_from((0, 1, 2, 3)), st.sampled_from((1, 2, 4)),
    st.sampled_from(((1, 1), (2, 1), (1, 2), (2, 2))), st.floats(0, 1),
)  # fmt: skip
def test_neither_dividing_nor_offloading_needs_more(
    precision: str, stage: int, context: int, degrees: tuple[int, int], ratio: float
) -> None:
    config = TrialConfig(precision=precision, zero_stage=stage, context_parallel_size=context)
    tensor, pipeline = degrees
    divided = config.replace({"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline})
    offloaded = config.replace({"offload_optimizer": "cpu", "offload_ratio": ratio})
    for engine in (None, BOTH):
        whole = states_lower_bound_bytes(config, MODEL, 16, engine)
        assert states_lower_bound_bytes(divided, MODEL, 16, engine) <= whole
        assert states_lower_bound_bytes(offloaded, MODEL, 16, engine) <= whole
        assert states_lower_bound_bytes(config, MODEL, 16) <= whole


@pytest.mark.parametrize(("bits", "frozen"), [(16, 2.0), (4, 0.5625)])
def test_under_adapters_all_else_is_frozen(bits: int, frozen: float) -> None:
    adapted = dataclasses.replace(MODEL, lora_rank=4, frozen_bits=bits)
    trained = adapted.adapter_parameters
    assert 0 < trained < COUNT
    for precision, each in (("fp32", 16), ("bf16", 18)):
        config = TrialConfig(precision=precision)
        assert states_lower_bound_bytes(config, adapted, 1, BOTH) == int(trained * each + COUNT * frozen)
    sharded = TrialConfig(precision="bf16", zero_stage=3)
    assert states_lower_bound_bytes(sharded, adapted, 4, BOTH) == int(trained * 16 / 4 + COUNT * frozen / 4)
