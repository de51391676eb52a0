"""The lower bound of the states: closed forms, and that dividing more never needs more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.huggingface import resolve_model
from search_spaces.model import FactoryModel
from search_spaces.states import states_lower_bound_bytes
from search_spaces.trial_config import TrialConfig

MODEL = resolve_model("llama-tiny")
COUNT = MODEL.parameter_count


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
    assert states_lower_bound_bytes(config, MODEL, 4) == int(COUNT * per_parameter)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_one_rank_no_stage_needs_more(stage: int) -> None:
    assert states_lower_bound_bytes(TrialConfig(zero_stage=stage), MODEL, 1) == 16 * COUNT


def test_model_parallelism_and_offload_divide() -> None:
    whole = states_lower_bound_bytes(TrialConfig(), MODEL, 4)
    assert states_lower_bound_bytes(TrialConfig(tensor_parallel_size=2), MODEL, 4) == whole // 2
    offloaded = TrialConfig(zero_stage=3, offload_optimizer="cpu")
    assert states_lower_bound_bytes(offloaded, MODEL, 4) == COUNT


def test_a_small_shard_group_divides_less() -> None:
    config = TrialConfig(zero_stage=3, hsdp_shard_size=2)
    assert states_lower_bound_bytes(config, MODEL, 8) == 8 * COUNT


def test_frozen_parameters_have_no_optimizer_state() -> None:
    model = FactoryModel(reference="m:f", parameter_count=1000, frozen_parameter_count=900)
    assert states_lower_bound_bytes(TrialConfig(), model, 1) == 100 * 16 + 900 * 4


@given(st.sampled_from(["fp32", "bf16", "fp16", "fp64"]), st.integers(1, 64))
def test_a_higher_stage_never_needs_more(precision: str, world: int) -> None:
    configs = [TrialConfig(precision=precision, zero_stage=stage) for stage in (1, 2, 3)]
    bounds = [states_lower_bound_bytes(config, MODEL, world) for config in configs]
    assert bounds == sorted(bounds, reverse=True)
