"""Modules that are not ours, in every dimension: losses, norms and weights after three steps against the module alone."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks.common.gang import Gang
from benchmarks.correctness.parity import run
from benchmarks.correctness.parity_cases import BRANCH, HUGGING_FACE, USER, Case, make_model
from benchmarks.correctness.parity_rank import compare
from executor.user_module.description import describe
from search_spaces.models.model import FactoryModel
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

BASE: dict[str, Any] = {"precision": "fp64", "param_persistence_threshold": 100, "micro_batch_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
FOLDED: dict[str, Any] = {**PIPELINE, "virtual_stages": 2, "pipeline_schedule": "zbv"}
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": "full"}


def case(model: str, engine: str = "native", ranks: int = 2, **knobs: Any) -> Case:
    return Case(engine=engine, ranks=ranks, model=model, config=TrialConfig().replace({**BASE, **knobs}))


@pytest.fixture(scope="module")
def pair() -> Iterator[Gang]:
    """Two ranks for all models: importing Hugging Face's classes takes longer than training them."""
    with Gang(2, compare) as gang:
        yield gang


def comparable(found: FactoryModel) -> FactoryModel:
    """Without what only real runs find."""
    return dataclasses.replace(found, flops_per_sample=None, precision="", loss_traits=(), refused_knobs=())


def wrong(gang: Gang, cases: Sequence[Case]) -> list[str]:
    return [f"{row.case.label()}: {row.error or row.off}" for row in run(gang, cases) if not row.right]


@pytest.mark.prove
def test_a_module_with_a_plan_runs_in_tensor_and_pipeline_dimensions(pair: Gang) -> None:
    """A part of what the parity matrix has of these models."""
    usual = {"param_persistence_threshold": TrialConfig().param_persistence_threshold}
    cases = [
        case(USER, zero_stage=3, **CHECKPOINTED), case(USER, zero_stage=3, **TENSOR), case(USER, zero_stage=1, **PIPELINE),
        case(USER, zero_stage=3, **PIPELINE), case(USER, zero_stage=2, **FOLDED, **CHECKPOINTED),
        case(BRANCH, zero_stage=2, **PIPELINE),
        *(case(USER, "fsdp2", zero_stage=3, **usual, **way) for way in (TENSOR, PIPELINE)),
    ]  # fmt: skip
    assert wrong(pair, cases) == []


@pytest.mark.nightly
def test_a_module_with_a_plan_runs_in_both_at_once() -> None:
    interleaved = {**PIPELINE, "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b"}
    with Gang(4, compare) as gang:
        both = ({**TENSOR, **PIPELINE}, interleaved)
        assert wrong(gang, [case(USER, ranks=4, zero_stage=3, **knobs) for knobs in both]) == []


@pytest.mark.parametrize("model", [USER, BRANCH])
def test_a_look_at_a_module_finds_what_the_matrix_states(model: str) -> None:
    stated = make_model(model, 3)
    assert isinstance(stated, FactoryModel)
    found = describe(stated.reference, Workload(global_batch_size=4, sequence_length=16))
    assert comparable(found) == stated
    # Between 2 and 8 FLOPs for each parameter and token: lookups have none, attention's products have no parameters.
    assert 2.0 < (found.flops_per_sample or 0.0) / stated.parameter_count / 16 < 8.0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 asks for it
@pytest.mark.parametrize("model", HUGGING_FACE)
def test_hugging_face_modules_train_as_they_do_alone(pair: Gang, model: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    if model == "hf-lora":
        pytest.importorskip("peft", reason="needs the extra transformers")
    stated = HUGGING_FACE[model]
    found = describe(stated.reference, Workload(global_batch_size=4, sequence_length=16))
    assert comparable(found) == stated
    assert found.flops_per_sample
    layouts = [{}, {"zero_stage": 2, **CHECKPOINTED}, {"zero_stage": 3}, {**PIPELINE, "zero_stage": 1}]
    layouts += [{**TENSOR, "zero_stage": 3}] if stated.tensor_divisor else []
    assert wrong(pair, [case(model, **layout) for layout in layouts]) == []
