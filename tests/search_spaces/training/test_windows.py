"""What a token sees through a window, which keys a block of queries visits, and what a configuration may ask for."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.canonical import canonical
from search_spaces.capability import SpaceContext
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import Model, ModelSpec
from search_spaces.rules.table import check_config
from search_spaces.training.adapters import configured
from search_spaces.training.windows import AttentionWindow, window_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

LENGTH = 64
MODEL = dataclasses.replace(resolve_model("llama-tiny"), num_attention_heads=8, num_key_value_heads=4)


def place(model: Model = MODEL, cluster: str = "local") -> SpaceContext:
    workload = Workload(global_batch_size=8, sequence_length=LENGTH)
    chosen = resolve_cluster(cluster, ranks=8) if cluster == "local" else resolve_cluster(cluster)
    return SpaceContext(model=model, cluster=chosen, workload=workload, world_size=8)


def seen(window: AttentionWindow, query: int, key: int) -> bool:
    if window.chunked:
        return key <= query and query // window.tokens == key // window.tokens
    near = not window.tokens or query - key < window.tokens
    return key <= query and (near or key < window.global_tokens)


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 400), st.integers(0, 300), st.booleans())
def test_blocks_cover_all_that_is_seen_and_nothing_twice(
    length: int, tokens: int, first: int, start: int, chunked: bool
) -> None:
    window, start = AttentionWindow(max(tokens, 1), 0 if chunked else first, chunked), min(start, length - 1)
    visits = [*window.visits(start, length - start)]
    assert [row for visit in visits for row in range(visit.first_query, visit.end)] == [*range(start, length)]
    for visit in visits:
        keys = [*range(visit.global_keys), *range(visit.first_key, visit.end)]
        assert len(keys) == len({*keys}) == visit.keys
        for query in (visit.first_query, visit.end - 1):
            assert {key for key in range(length) if seen(window, query, key)} <= {*keys}


@given(st.integers(1, 80), st.integers(0, 80), st.integers(0, 80), st.booleans())
def test_visible_pairs_are_those_that_are_seen(length: int, tokens: int, first: int, chunked: bool) -> None:
    window = AttentionWindow(max(tokens, 1), 0, chunked) if chunked else AttentionWindow(tokens, first)
    pairs = sum(seen(window, query, key) for query in range(length) for key in range(length))
    assert window.visible_pairs(length) == pairs
    assert window.hides(length) == (pairs < length * (length + 1) // 2)
    if tokens:
        assert window.visited_pairs(length) >= pairs


@pytest.mark.parametrize(("tokens", "first"), [(128, 0), (512, 0), (512, 16), (4096, 0)])
def test_what_is_visited_in_vain_is_bounded(tokens: int, first: int) -> None:
    window, length = AttentionWindow(tokens, first), 65536
    assert window.visited_pairs(length) <= 2.01 * window.visible_pairs(length)


def test_the_shorter_window_holds() -> None:
    mistral = resolve_model("mistral-7b")
    config = TrialConfig(attention_window=256, attention_global_tokens=4)
    assert window_of(configured(mistral, config)) == AttentionWindow(256, 4)
    assert window_of(configured(mistral, TrialConfig(attention_window=8192))) == AttentionWindow(mistral.sliding_window)
    assert window_of(configured(MODEL, config)) == AttentionWindow(256, 4)
    assert configured(MODEL, TrialConfig()) is MODEL


def test_a_window_of_everything_is_none() -> None:
    for tokens in (LENGTH, 10 * LENGTH):
        assert canonical(TrialConfig(attention_window=tokens, attention_global_tokens=3), place()) == TrialConfig()
    own = dataclasses.replace(MODEL, sliding_window=16)
    assert canonical(TrialConfig(attention_window=16), place(own)) == TrialConfig()
    assert canonical(TrialConfig(attention_window=15), place(own)).attention_window == 15
    assert canonical(TrialConfig(attention_global_tokens=3, context_parallel_method="ulysses"), place()) == TrialConfig()


def refused_by(config: TrialConfig, context: SpaceContext) -> list[str]:
    return [refusal.rule for refusal in check_config(config, context)]


def test_heads_are_divided_by_tensor_and_context_ranks() -> None:
    for tensor, context, refused in ((1, 4, False), (2, 2, False), (2, 4, True), (1, 8, True)):
        config = TrialConfig(tensor_parallel_size=tensor, context_parallel_size=context, context_parallel_method="ulysses")
        assert refused_by(config, place()) == ["ulysses-heads"] * refused
    told = check_config(config, place())[0].message
    assert told == "8 ranks of context x tensor do not divide key-value heads (4) of llama-tiny"


def test_exchanged_sequences_need_one_chunk_a_rank() -> None:
    odd = dataclasses.replace(place(), workload=Workload(global_batch_size=8, sequence_length=60))
    for method, refused in (("gather", ["sequence-divides"]), ("ulysses", [])):
        config = TrialConfig(context_parallel_size=4, context_parallel_method=method)
        assert refused_by(config, odd) == refused


def test_a_named_kernel_that_takes_no_mask_is_refused() -> None:
    config = TrialConfig(attention_backend="flash", precision="bf16", attention_window=16)
    assert refused_by(config, place(cluster="dgx-a100")) == ["attention-kernel"]
    assert refused_by(config.replace({"attention_window": 0}), place(cluster="dgx-a100")) == []
    assert refused_by(config.replace({"attention_backend": "efficient"}), place(cluster="dgx-a100")) == []


def test_chunks_are_whole_where_ranks_cut_between_them() -> None:
    window = AttentionWindow(16, chunked=True)
    assert [window.has_whole_chunks(*piece) for piece in ((0, 64), (16, 32), (8, 16), (16, 24))] == [True, True, False, False]
    assert not AttentionWindow(16).has_whole_chunks(0, 64)


FLASH = {"attention_backend": "flash", "precision": "bf16"}
CHUNKED = dataclasses.replace(MODEL, sliding_window=16, chunked_attention=True)


@pytest.mark.parametrize(
    ("knobs", "refused"),
    [
        ({**FLASH}, []),
        ({**FLASH, "context_parallel_size": 2}, []),
        ({**FLASH, "context_parallel_size": 4}, ["attention-kernel"]),
        ({**FLASH, "context_parallel_size": 4, "context_parallel_method": "ulysses"}, []),
        ({"attention_window": 8}, ["attention-window"]),
    ],
)  # fmt: skip
def test_chunks_need_a_mask_only_where_ranks_cut_them(knobs: dict[str, Any], refused: list[str]) -> None:
    assert refused_by(TrialConfig().replace(knobs), place(CHUNKED, "dgx-a100")) == refused


def test_flops_are_those_of_the_tokens_that_are_seen() -> None:
    def attention(model: ModelSpec) -> float:
        return model.flops_per_token(LENGTH) - model.flops_per_token(0)

    narrow = configured(MODEL, TrialConfig(attention_window=12, attention_global_tokens=4))
    assert attention(narrow) == attention(MODEL) / 4
    assert attention(CHUNKED) == attention(MODEL) / 4
    cut = dataclasses.replace(CHUNKED, sliding_window=24)
    assert attention(cut) == pytest.approx(attention(MODEL) * (24**2 + 24**2 + 16**2) / LENGTH**2)
