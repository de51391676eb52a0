"""Adapters and virtual tokens as knobs: what they train, what refuses them, and the lower bound of their states."""

import dataclasses
import re
from typing import Any

import pytest

from search_spaces.canonical import canonical
from search_spaces.capability import Capability, SpaceContext
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.errors import KnobValueError
from search_spaces.knob import METHODS
from search_spaces.knob_values import parse_value
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel, Model
from search_spaces.rules.table import check_config
from search_spaces.training.adapters import adapted, adapts, layer_adapter_elements
from search_spaces.training.states import states_lower_bound_bytes
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


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_projections_of_latent_attention(name: str) -> None:
    """Those to narrow vectors are whole on each tensor rank, and so are both factors of their adapters."""
    model = adapted(resolve_model(name), TrialConfig(lora_rank=4))
    hidden, latent, heads = model.hidden_size, model.latent, model.num_attention_heads
    assert latent is not None
    down = latent.key_value_rank + latent.rotated
    keys = heads * (model.head_dim - latent.rotated + latent.value_size)
    whole, divided = hidden + down + latent.key_value_rank + hidden, heads * model.head_dim + keys + heads * latent.value_size
    whole += hidden + 2 * latent.query_rank if latent.query_rank else hidden
    assert layer_adapter_elements(model) == (4 * whole, 4 * divided)
    assert model.adapter_parameters == model.num_layers * 4 * (whole + divided)


@pytest.mark.parametrize("targets", ["mlp", "both"])
def test_shared_experts_and_dense_layers_have_no_adapters(targets: str) -> None:
    model = resolve_model("deepseek-v3")
    (refused,) = check_config(TrialConfig(lora_rank=4, lora_targets=targets), context(model))
    assert (refused.rule, f"lora_targets={targets}" in refused.message) == ("adapters", True)
    assert check_config(TrialConfig(lora_rank=4), context(model)) == []
    (refused,) = check_config(TrialConfig(prefix_length=4), context(model))
    assert refused.message.endswith("has latent attention")


def test_every_expert_has_adapters_of_its_own() -> None:
    experts = dataclasses.replace(MODEL, num_experts=4, experts_per_token=2)
    found = [adapted(model, TrialConfig(lora_rank=4, lora_targets="mlp")).adapter_parameters for model in (MODEL, experts)]
    assert found[1] == 4 * found[0]


@pytest.mark.parametrize(
    ("model", "rank", "told"),
    [
        (MODEL, HIDDEN + 1, "are wider than a matrix: .* has rank"),
        (dataclasses.replace(MODEL, lora_rank=8), 8, "has adapters of rank 8 already"),
        (dataclasses.replace(MODEL, prefix_length=8), 8, "has adapters already"),
        (FactoryModel(reference="mine:make", parameter_count=10), 8, "not for mine:make"),
    ],
)
def test_adapters_that_cannot_be_are_refused(model: Model, rank: int, told: str) -> None:
    refused = {item.rule: item for item in check_config(TrialConfig(lora_rank=rank), context(model))}
    assert re.search(told, refused["adapters"].message)
    assert "smaller adapters" in refused["adapters"].remedy
    assert "adapters" not in {item.rule for item in check_config(TrialConfig(), context(model))}


def test_an_engine_without_adapters_refuses_them() -> None:
    refused = check_config(TrialConfig(lora_rank=4), context(capability=Capability(engine="plain", knobs={})))
    assert [item.rule for item in refused] == ["engine-honours"]


def test_an_unknown_target_is_told_with_the_names() -> None:
    with pytest.raises(KnobValueError, match="lora_targets: 'query' is not in its domain; give attention, mlp or both"):
        parse_value("lora_targets", "query")


def test_without_adapters_their_targets_are_one_configuration() -> None:
    assert canonical(TrialConfig(lora_targets="mlp", frozen_dtype="nf4"), context()) == TrialConfig()
    for method in METHODS:
        kept = canonical(TrialConfig(frozen_dtype="nf4", lora_targets="mlp").replace({method: 4}), context())
        assert (kept.frozen_dtype, kept.lora_targets) == ("nf4", "mlp" if method == "lora_rank" else "attention")
    assert TrialConfig(lora_rank=4, lora_targets="mlp").hash != TrialConfig(lora_rank=4).hash


LAYERS = MODEL.num_layers


@pytest.mark.parametrize(
    ("knobs", "layer", "once"),
    [
        ({"adapter_size": 8}, (2 * (2 * 8 * HIDDEN + 8 + HIDDEN), 0), 0),
        ({"prefix_length": 5}, (0, 2 * 5 * KEYS), 0),
        ({"prompt_length": 5}, (0, 0), 5 * HIDDEN),
    ],
    ids=str,
)
def test_what_else_is_trained_beside_a_frozen_model(knobs: dict[str, int], layer: tuple[int, int], once: int) -> None:
    model = adapted(MODEL, TrialConfig().replace(knobs))
    assert adapts(TrialConfig().replace(knobs))
    assert layer_adapter_elements(model) == layer
    assert model.adapter_parameters == LAYERS * sum(layer) + once
    assert model.parameter_count == COUNT


def test_flops_beside_a_frozen_model() -> None:
    """4 a frozen parameter that is multiplied; 6 one of a bottleneck; a prefix is looked at; a prompt passes the layers."""
    length = 64
    frozen = adapted(MODEL, TrialConfig(prefix_length=1)).flops_per_token(length) - 12 * LAYERS * QUERIES
    head = MODEL.vocab_size * HIDDEN
    assert (
        frozen == 4 * (COUNT - MODEL.input_embedding_parameters + head * MODEL.tied_embeddings) + 12 * LAYERS * QUERIES * length
    )

    def of(**knobs: int) -> float:
        return adapted(MODEL, TrialConfig().replace(knobs)).flops_per_token(length)

    assert of(adapter_size=8) == frozen + 6 * LAYERS * 2 * (2 * 8 * HIDDEN + 8 + HIDDEN)
    assert of(prefix_length=16) == frozen + 12 * LAYERS * QUERIES * 16
    inside = frozen - 4 * head - 12 * LAYERS * QUERIES * length + 12 * LAYERS * QUERIES * (length + 16)
    assert of(prompt_length=16) == pytest.approx(4 * head + inside * (length + 16) / length)


@pytest.mark.parametrize("other", [name for name in METHODS if name != "prefix_length"])
def test_two_methods_at_once_are_refused(other: str) -> None:
    config = TrialConfig(prefix_length=4).replace({other: 4})
    refused = {item.rule: item for item in check_config(config, context())}
    assert re.search(rf"(?=.*{other}=4)(?=.*prefix_length=4).* are different methods", refused["adapters-together"].message)


@pytest.mark.parametrize("name", ["prefix_length", "prompt_length"])
def test_more_virtual_tokens_than_real_ones_are_refused(name: str) -> None:
    (refused,) = check_config(TrialConfig().replace({name: 65}), context())
    assert refused.message == f"{name}=65 is longer than the samples of 64 tokens"
    assert check_config(TrialConfig().replace({name: 64}), context()) == []


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
