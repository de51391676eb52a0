"""Llama 4's layers by formulas written out: chunks, norms of rotated heads, factors of queries, weighted inputs of experts."""

import dataclasses

import pytest
import torch
from torch import Tensor

from executor.parallel.experts import Experts
from executor.parallel.model import Attention, build_transformer
from executor.parallel.operators import query_factors, rotary_table, rotate
from search_spaces.errors import ModelFormatError
from search_spaces.models.model import HeadNorm, Latent, ModelSpec

TOKENS, CHUNK = 12, 5
LATENT = Latent(key_value_rank=5, rotated=2, value_size=6)
SPEC = ModelSpec(
    name="llama4", family="llama4_text", num_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
    ffn_hidden_size=8, vocab_size=32, sequence_length=TOKENS, head_norm=HeadNorm.ROTATED, sliding_window=CHUNK,
    chunked_attention=True, whole_layers=(False, True), rotated_layers=(True, False), query_temperature=0.5, temperature_span=4,
    num_experts=4, experts_per_token=2, sigmoid_routing=True, normalised_routing=False, weighted_inputs=True,
    shared_expert_size=8, dense_layers=(True, False), dense_ffn_size=24,
)  # fmt: skip


def layers_of(spec: ModelSpec, kind: type[torch.nn.Module]) -> list[torch.nn.Module]:
    model = build_transformer(spec, TOKENS, seed=0, dtype=torch.float64)
    return [module for module in model.modules() if isinstance(module, kind)]


def normed(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + SPEC.norm_epsilon).sqrt()


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_is_that_of_its_formula(layer: int) -> None:
    attention = layers_of(SPEC, Attention)[layer]
    assert isinstance(attention, Attention)
    x = torch.randn(2, TOKENS, 16, dtype=torch.float64)
    query, key, value = (
        matrix(x).view(2, TOKENS, heads, 6).transpose(1, 2)
        for matrix, heads in ((attention.query, 4), (attention.key, 2), (attention.value, 2))
    )
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    if layer == 0:
        tables = tuple(table.double() for table in rotary_table(SPEC, TOKENS))
        query, key = normed(rotate(query, *tables)), normed(rotate(key, *tables))
        chunks = torch.arange(TOKENS) // CHUNK
        seen &= chunks[:, None] == chunks
    else:
        # 1 + 0.5 log(1 + floor((p + 1) / 4)) at positions 0 to 11.
        steps = torch.tensor([0.0] * 3 + [1.0] * 4 + [2.0] * 4 + [3.0], dtype=torch.float64)
        tables = ((1 + 0.5 * (1 + steps).log())[:, None],)
        query = query * tables[0]
        assert torch.allclose(query_factors(SPEC, TOKENS), tables[0])
    key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    scores = (query @ key.mT / 6**0.5).masked_fill(~seen, float("-inf"))
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    assert torch.allclose(attention(x, tables), attention.output(mixed), atol=1e-12)


def test_weights_multiply_what_experts_read() -> None:
    experts = layers_of(SPEC, Experts)[0]
    assert isinstance(experts, Experts) and experts.shared is not None
    x = torch.randn(2, TOKENS, 16, dtype=torch.float64)
    expected = experts.shared(x).flatten(0, 1).clone()
    for row, token in enumerate(x.flatten(0, 1)):
        scores = experts.router(token)
        for expert in scores.topk(2).indices.tolist():
            expected[row] += experts.experts[str(expert)](scores[expert].sigmoid() * token)
    assert torch.allclose(experts(x).flatten(0, 1), expected, atol=1e-12)


def test_an_empty_place_of_an_expert_adds_nothing() -> None:
    whole = build_transformer(SPEC, TOKENS, seed=0, dtype=torch.float64)
    capped = build_transformer(dataclasses.replace(SPEC, capacity_factor=2.0), TOKENS, seed=0, dtype=torch.float64)
    tokens = torch.arange(2 * TOKENS).view(2, TOKENS)
    assert torch.allclose(whole(tokens, tokens), capped(tokens, tokens), atol=1e-12)


def test_parameters_are_those_of_the_module() -> None:
    model = build_transformer(SPEC, TOKENS, seed=0, dtype=torch.float64)
    assert sum(parameter.numel() for parameter in model.parameters()) == SPEC.parameter_count


def test_queries_of_short_sequences_are_not_multiplied() -> None:
    model = build_transformer(SPEC, 3, seed=0, dtype=torch.float64)
    plain = build_transformer(dataclasses.replace(SPEC, query_temperature=0.0), 3, seed=0, dtype=torch.float64)
    tokens = torch.arange(3)[None]
    assert model._query_factors(torch.float64, None) is None
    assert torch.equal(model(tokens, tokens), plain(tokens, tokens))
    model.set_length(4)
    assert model._query_factors(torch.bfloat16, None)[0].dtype == torch.float32  # type: ignore[index]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"global_tokens": 2}, "chunked_attention: needs a sliding_window as its length, and no global_tokens; give"),
        ({"sliding_window": 0, "whole_layers": ()}, "chunked_attention: needs a sliding_window as its length"),
        ({"temperature_span": 0}, "temperature_span: 0 is not positive; give a positive integer"),
        ({"query_temperature": -1.0}, "query_temperature: -1.0 is negative or not finite; give a positive number"),
        ({"mlp_bias": True}, "weighted_inputs: is for experts without biases; leave it out, or mlp_bias"),
        ({"latent": LATENT, "num_key_value_heads": 4}, "latent: has no norms or factors of queries; leave"),
    ],
)  # fmt: skip
def test_what_contradicts_is_named_in_one_line(more: dict[str, object], line: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        dataclasses.replace(SPEC, **more)  # type: ignore[arg-type]
    assert str(caught.value).startswith(line)
