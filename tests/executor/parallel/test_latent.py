"""Latent attention, the routing of DeepSeek, and layers with and without experts, by formulas written out."""

import dataclasses

import pytest
import torch

from executor.parallel.collectives import ProcessGroup
from executor.parallel.experts import Experts
from executor.parallel.latent import LatentAttention
from executor.parallel.model import Transformer, build_transformer, whole
from executor.parallel.tensor import TensorParallel
from search_spaces.models.model import Latent, ModelSpec
from search_spaces.training.adapters import adapted, layer_adapter_elements
from search_spaces.trial_config import TrialConfig

SPEC = ModelSpec(
    name="latent", family="deepseek_v3", num_layers=3, hidden_size=16, num_attention_heads=4, num_key_value_heads=4, head_dim=6,
    ffn_hidden_size=8, vocab_size=32, sequence_length=12,
    latent=Latent(key_value_rank=5, rotated=2, value_size=3, query_rank=7),
    num_experts=8, experts_per_token=3, sigmoid_routing=True, router_correction=True, router_groups=4, router_groups_kept=2,
    routing_scale=2.5, shared_expert_size=8, dense_layers=(True, False, False), dense_ffn_size=24,
)  # fmt: skip


def layers_of(spec: ModelSpec, kind: type[torch.nn.Module]) -> list[torch.nn.Module]:
    model = build_transformer(spec, 12, seed=0, dtype=torch.float64)
    return [module for module in model.modules() if isinstance(module, kind)]


def test_parameters_are_those_of_the_module() -> None:
    for spec in (SPEC, dataclasses.replace(SPEC, latent=Latent(key_value_rank=5, rotated=2, value_size=3), qkv_bias=True)):
        model = build_transformer(spec, 12, seed=0, dtype=torch.float64)
        assert sum(parameter.numel() for parameter in model.parameters()) == spec.parameter_count
        experts = sum(value.numel() for name, value in model.named_parameters() if ".experts." in name)
        assert experts == spec.expert_parameters


def test_attention_is_that_of_whole_queries_keys_and_values() -> None:
    attention = layers_of(SPEC, LatentAttention)[0]
    assert (
        isinstance(attention, LatentAttention) and attention.query_down is not None and attention.query_latent_norm is not None
    )
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    query = attention.query(attention.query_latent_norm(attention.query_down(x))).view(2, 12, 4, 6).transpose(1, 2)
    narrow, shared = attention.key_value_down(x)[..., :5], attention.key_value_down(x)[..., 5:]
    both = attention.key_value(attention.key_value_latent_norm(narrow)).view(2, 12, 4, 7).transpose(1, 2)
    key = torch.cat((both[..., :4], shared[:, None].expand(2, 4, 12, 2)), dim=-1)
    scores = (query @ key.mT / 6**0.5).masked_fill(torch.ones(12, 12).triu(1) > 0, float("-inf"))
    mixed = (scores.softmax(-1) @ both[..., 4:]).transpose(1, 2).flatten(2)
    assert torch.allclose(attention(x, None), attention.output(mixed), atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("query_rank", [0, 7])
def test_low_rank_adapters_are_beside_every_projection(query_rank: int, ranks: int) -> None:
    """Of two tensor ranks each has the factors that are whole, and its half of the others."""
    assert SPEC.latent is not None
    spec = adapted(
        dataclasses.replace(SPEC, latent=dataclasses.replace(SPEC.latent, query_rank=query_rank)), TrialConfig(lora_rank=2)
    )
    part = dataclasses.replace(whole(spec), tensor=TensorParallel(ProcessGroup(None, ranks, 0), sequence_parallel=False))
    model = Transformer(spec, spec.sequence_length, part=part)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    own, divided = layer_adapter_elements(spec)
    assert sum(value.numel() for value in trained.values()) == spec.num_layers * (own + divided // ranks)
    summands = {name.split(".")[-3] + "." + name.rpartition(".")[2] for name in model.summand_parameters() if name in trained}
    # Narrow vectors are computed whole on each rank, with the whole gradient.
    expected = {"query.lora_a", "key_value.lora_a", "output.lora_b"} if ranks > 1 else set()
    assert summands == expected


def routed(spec: ModelSpec, correction: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts = layers_of(spec, Experts)[0]
    assert isinstance(experts, Experts)
    if correction is not None:
        experts.correction = correction
    scores = torch.randn(2, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return scores, *experts._route(scores)


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_a_token_goes_to_experts_of_its_best_groups(kept: int) -> None:
    spec = dataclasses.replace(SPEC, router_groups_kept=kept, experts_per_token=2)
    scores, chosen, weights = routed(spec)
    for row, picked, own in zip(scores.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1), strict=True):
        shares = [float(value) for value in row.sigmoid()]
        groups = sorted(range(4), key=lambda group: -sum(shares[2 * group : 2 * group + 2]))[:kept]
        best = sorted((expert for expert in range(8) if expert // 2 in groups), key=lambda expert: -shares[expert])[:2]
        assert sorted(best) == sorted(picked.tolist())
        total = sum(shares[expert] for expert in best)
        assert own.tolist() == pytest.approx([2.5 * shares[expert] / total for expert in picked.tolist()])


def test_a_correction_changes_the_choice_but_not_the_weights() -> None:
    spec = dataclasses.replace(SPEC, router_groups=1, router_groups_kept=1)
    correction = torch.zeros(8, dtype=torch.float64)
    correction[5] = 10.0
    scores, chosen, weights = routed(spec, correction)
    assert bool((chosen == 5).any(-1).all())
    shares = scores.sigmoid().gather(-1, chosen)
    assert torch.allclose(weights, 2.5 * shares / shares.sum(-1, keepdim=True))


def test_weights_without_a_norm_are_shares_of_all() -> None:
    spec = dataclasses.replace(
        SPEC, sigmoid_routing=False, router_correction=False, router_groups=1, router_groups_kept=1, normalised_routing=False
    )
    scores, chosen, weights = routed(spec)
    assert torch.allclose(weights, 2.5 * scores.softmax(-1).gather(-1, chosen))


def test_the_first_layer_is_dense_and_each_other_has_shared_experts() -> None:
    model = build_transformer(SPEC, 12, seed=0, dtype=torch.float64)
    kinds = [type(block.mlp).__name__ for block in model.layers()]  # type: ignore[attr-defined]
    assert kinds == ["FeedForward", "Experts", "Experts"]
    experts = layers_of(SPEC, Experts)[0]
    assert isinstance(experts, Experts) and experts.shared is not None
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    whole, shared = experts(x), experts.shared(x)
    experts.shared = None
    assert torch.allclose(whole, experts(x) + shared, atol=1e-12)
