"""Low-rank adapters as knobs: what they train, what refuses them, and the lower bound of their states."""

import dataclasses
import re
from typing import Any

import pytest

from search_spaces.adapters import adapted, layer_adapter_elements
from search_spaces.canonical import canonical
from search_spaces.capability import Capability
from search_spaces.clusters import resolve_cluster
from search_spaces.context import SpaceContext
from search_spaces.errors import KnobValueError
from search_spaces.huggingface import resolve_model
from search_spaces.knobs import parse_value
from search_spaces.model import FactoryModel, Model
from search_spaces.rules import check_config
from search_spaces.states import states_lower_bound_bytes
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL = resolve_model("llama-tiny")
COUNT = MODEL.parameter_count
QUERIES, KEYS = MODEL.num_attention_heads * MODEL.head_dim, MODEL.num_key_value_heads * MODEL.head_dim
HIDDEN, FFN = MODEL.hidden_size, MODEL.ffn_hidden_size


def context(model: Model = MODEL, capability: Capability | None = None) -> SpaceContext:
    work = Workload(global_batch_size=8, sequence_length=64)
    cluster = resolve_cluster("local", ranks=4)
    return SpaceContext(model=model, cluster=cluster, workload=work, world_size=4, capability=capability)


@pytest.mark.parametrize(
    ("targets", "whole", "divided"),
    [
        ("attention", 4 * HIDDEN, 2 * QUERIES + 2 * KEYS),
        ("mlp", 3 * HIDDEN, 3 * FFN),
        ("both", 7 * HIDDEN, 2 * QUERIES + 2 * KEYS + 3 * FFN),
    ],
)
def test_tensor_ranks_divide_the_factor_on_the_divided_side(targets: str, whole: int, divided: int) -> None:
    model = adapted(MODEL, TrialConfig(lora_rank=4, lora_targets=targets))
    assert layer_adapter_elements(model) == (4 * whole, 4 * divided)
    assert model.adapter_parameters == MODEL.num_layers * 4 * (whole + divided)


def test_every_expert_has_adapters_of_its_own() -> None:
    experts = dataclasses.replace(MODEL, num_experts=4, experts_per_token=2)
    found = [adapted(model, TrialConfig(lora_rank=4, lora_targets="mlp")).adapter_parameters for model in (MODEL, experts)]
    assert found[1] == 4 * found[0]


@pytest.mark.parametrize(
    ("model", "rank", "told"),
    [
        (MODEL, HIDDEN + 1, "are wider than a matrix: .* has rank"),
        (dataclasses.replace(MODEL, lora_rank=8), 8, "has adapters of rank 8 already"),
        (FactoryModel(reference="mine:make", parameter_count=10), 8, "not those of mine:make"),
    ],
)
def test_adapters_that_cannot_be_are_refused(model: Model, rank: int, told: str) -> None:
    refused = {item.rule: item for item in check_config(TrialConfig(lora_rank=rank), context(model))}
    assert re.search(told, refused["adapters"].message)
    assert "smaller lora_rank" in refused["adapters"].remedy
    assert "adapters" not in {item.rule for item in check_config(TrialConfig(), context(model))}


def test_an_engine_without_adapters_refuses_them() -> None:
    refused = check_config(TrialConfig(lora_rank=4), context(capability=Capability(engine="plain", knobs={})))
    assert [item.rule for item in refused] == ["engine-honours"]


def test_an_unknown_target_is_told_with_the_names() -> None:
    with pytest.raises(KnobValueError, match="lora_targets: 'query' is not in its domain; give attention, mlp or both"):
        parse_value("lora_targets", "query")


def test_without_adapters_their_targets_are_one_configuration() -> None:
    assert canonical(TrialConfig(lora_targets="mlp", frozen_dtype="nf4"), context()) == TrialConfig()
    assert TrialConfig(lora_rank=4, lora_targets="mlp").hash != TrialConfig(lora_rank=4).hash


@pytest.mark.parametrize(
    ("knobs", "trained", "frozen"),
    [
        ({"precision": "bf16"}, 18, 2),
        ({"precision": "fp32"}, 16, 4),
        ({"precision": "bf16", "zero_stage": 2}, 2 + 16 / 4, 2),
        ({"precision": "bf16", "zero_stage": 3}, 16 / 4, 2 / 4),
        ({"precision": "fp32", "zero_stage": 3}, 16 / 4, 4 / 4),
        ({"precision": "bf16", "zero_stage": 3, "offload_param": "cpu"}, 12 / 4, 0),
        ({"precision": "bf16", "frozen_dtype": "int8"}, 18, 1 + 1 / 16),
        ({"precision": "fp32", "frozen_dtype": "nf4"}, 16, 1 / 2 + 1 / 16),
        ({"precision": "bf16", "zero_stage": 3, "frozen_dtype": "nf4"}, 16 / 4, (1 / 2 + 1 / 16) / 4),
    ],
)
def test_frozen_parameters_have_one_copy_in_the_precision(knobs: dict[str, Any], trained: float, frozen: float) -> None:
    config = TrialConfig(lora_rank=4).replace(knobs)
    adapters = adapted(MODEL, config).adapter_parameters
    native = Capability(engine="native", knobs={}, keeps_copy_beside_gradients=True)
    assert states_lower_bound_bytes(config, MODEL, 4, native) == int(adapters * trained + COUNT * frozen)
