"""Loads of experts as whole numbers of tokens, drawn choices, and the rows of the busiest rank."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.training.expert_loads import busiest, drawn_choices, expert_counts, layer_shares, loads_problem

MIXTRAL, MAVERICK = resolve_model("mixtral-8x7b"), resolve_model("llama-4-maverick-17b-128e")


def loaded(model: ModelSpec, *rows: tuple[float, ...]) -> ModelSpec:
    assert loads_problem(rows, model) is None
    return dataclasses.replace(model, expert_loads=rows)


@given(st.lists(st.integers(0, 100), min_size=4, max_size=12), st.integers(1, 60), st.integers(1, 4))
def test_counts_follow_the_shares_to_the_nearest_token(loads: list[int], tokens: int, choices: int) -> None:
    total = max(sum(loads), 1)
    # No expert more than once for each token.
    shares = [min(load / total, 1 / choices) for load in loads]
    shares = [share + (1 - sum(shares)) / len(shares) for share in shares]
    if max(shares) * choices > 1:
        return
    counts = expert_counts(shares, tokens, choices)
    assert sum(counts) == tokens * choices
    assert max(counts) <= tokens
    assert all(abs(count - share * tokens * choices) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True))


def test_each_token_gets_other_experts_and_each_layer_other_tokens() -> None:
    model = loaded(MIXTRAL, (4, 1, 1, 1, 1, 1, 1, 2))
    chosen = drawn_choices(model, 0, 96, 0)
    assert Counter(expert for token in chosen for expert in token) == Counter(
        dict(enumerate(expert_counts(layer_shares(model, 0), 96, 2)))
    )
    assert all(len(set(token)) == 2 for token in chosen)
    assert chosen != drawn_choices(model, 1, 96, 0)
    assert chosen != drawn_choices(model, 0, 96, 1)


def test_a_row_for_each_layer_with_experts() -> None:
    rows = tuple((1.0 + layer, *(1.0,) * 127) for layer in range(24))
    model = loaded(MAVERICK, *rows)
    assert layer_shares(model, 1)[0] == pytest.approx(1 / 128)
    assert layer_shares(model, 47)[0] == pytest.approx(24 / 151)
    # So that no depths are extrapolated from, of which each layer differs.
    assert (model.layer_period, loaded(MAVERICK, rows[0]).layer_period) == (48, 4)


def test_the_busiest_rank() -> None:
    model = dataclasses.replace(MIXTRAL, num_layers=2, expert_loads=((3, 1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1, 3)))
    assert busiest(model, 1) == (1.0, 1.0)
    # Of 10 parts a rank of 8 has 3 instead of 1.25 in each layer: other ranks in each, so that none keeps as much.
    assert busiest(model, 8) == pytest.approx((3 / 1.25, (3 + 1) / 2 / 1.25))
    assert busiest(model, 2) == pytest.approx((6 / 5, 1.0))
    assert busiest(dataclasses.replace(model, capacity_factor=1.0), 8) == (1.0, 1.0)


def test_a_shallower_model_follows_one_row() -> None:
    model = loaded(MIXTRAL, (4, 1, 1, 1, 1, 1, 1, 2))
    assert layer_shares(dataclasses.replace(model, num_layers=4), 3) == layer_shares(model, 31)
