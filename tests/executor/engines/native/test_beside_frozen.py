"""Bottlenecks, prefixes and prompts: what a step sends and holds against closed forms, on two real ranks; what they compute."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from two_ranks import RANKS, Measure, measuring

from executor.batches import text_data
from executor.parallel.model import Transformer, build_transformer
from search_spaces.models.model import ModelSpec, Position
from search_spaces.training.adapters import adapted
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

BYTES = 4  # fp32
STEP_COUNTER = 4
SPEC = ModelSpec(
    name="beside", family="llama", num_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ffn_hidden_size=96, vocab_size=256, sequence_length=16,
)  # fmt: skip

pytestmark = pytest.mark.nightly
"""`make oldest` runs these too."""
WORKLOAD = Workload(global_batch_size=8, sequence_length=16)
METHODS: dict[str, dict[str, int]] = {
    "bottleneck": {"adapter_size": 4}, "prefix": {"prefix_length": 4}, "prompt": {"prompt_length": 4},
}  # fmt: skip
LAYER = {"bottleneck": 2 * (2 * 4 * 64 + 4 + 64), "prefix": 2 * 4 * 2 * 16, "prompt": 0}
"""Trained elements of a layer."""
TRAINED = {"bottleneck": 3 * LAYER["bottleneck"], "prefix": 3 * LAYER["prefix"], "prompt": 4 * 64}

P = SPEC.parameter_count
EMBEDDING = SPEC.vocab_size * SPEC.hidden_size
HEAD = EMBEDDING + SPEC.hidden_size
UNITS = SPEC.num_layers + 2
NORM = (1, 1)
SHARDED = {"zero_stage": 3, "prefetch_bucket_size": 0, "param_persistence_threshold": 0}
TOKENS = WORKLOAD.global_batch_size * SPEC.sequence_length


@pytest.fixture(scope="module")
def measure(forked_ranks: None) -> Iterator[Measure]:
    with measuring(SPEC, WORKLOAD) as run:
        yield run


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", range(4))
def test_data_parallel_ranks_send_what_is_trained(measure: Measure, stage: int, method: str) -> None:
    """At stage 3 what is frozen travels with it. A prompt goes with the table, which backward has no use for."""
    a, in_table = TRAINED[method], TRAINED[method] * (method == "prompt")
    gathered = (2 * (2 * UNITS - 2), 2 * (2 * (P + a) - HEAD - EMBEDDING - in_table))
    expected: dict[str, tuple[int, int]] = [
        {"all_reduce": (1, a)},
        {"reduce_scatter": (1, a), "all_gather": (1, a), "all_reduce": NORM},
        {"reduce_scatter": (2, 2 * a), "all_gather": (1, a), "all_reduce": NORM},
        {"reduce_scatter": (2, 2 * a), "all_gather": gathered, "all_reduce": NORM},
    ][stage]
    knobs = {**(SHARDED if stage == 3 else {"zero_stage": stage}), **METHODS[method], "micro_batch_size": 2}
    for rank in measure(**knobs).ranks:
        sent = {count.operation: (count.count, count.bytes) for count in rank.collectives}
        assert sent == {name: (count, elements * BYTES) for name, (count, elements) in expected.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", range(4))
def test_frozen_parameters_have_no_states(measure: Measure, stage: int, method: str) -> None:
    a = TRAINED[method]
    knobs = {**(SHARDED if stage == 3 else {"zero_stage": stage}), **METHODS[method], "micro_batch_size": 2}
    rank = measure(**knobs).ranks[0]
    assert rank.tag_peak_bytes["optimizer_state"] == (8 * a if stage == 0 else 12 * a // RANKS) + STEP_COUNTER
    gradients = 4 * a if stage == 0 else 6 * a if stage == 1 else 2 * a
    together = BYTES * (4 * 64 + 64)  # of a matrix and its bias
    assert gradients <= rank.tag_peak_bytes["gradients"] <= gradients + together
    held = rank.tag_peak_bytes["parameters"]
    if stage < 3:
        assert held == BYTES * (P + a)
    else:  # the shares of what is frozen, and the units in use
        block = SPEC.layer_parameters + LAYER[method]
        assert BYTES * HEAD <= held - BYTES * P // RANKS <= BYTES * (HEAD + block)


@pytest.mark.parametrize("method", METHODS)
def test_tensor_parallel_ranks_send_nothing_more(measure: Measure, method: str) -> None:
    """Of the first layer no gradient goes back beyond the first that is trained: behind attention, in it, or before it. The
    tokens of a prompt travel as others do, but that every rank has them when the table's rows are summed.
    """
    needless, inside = (0, 20 * 8) if method == "prompt" else (1, TOKENS)
    messages = (4 * SPEC.num_layers - needless + 1) * inside + TOKENS
    count = 4 * SPEC.num_layers - needless + 2
    for rank in measure(**METHODS[method], tensor_parallel_size=2, micro_batch_size=8).ranks:
        (sent,) = rank.collectives
        assert (sent.mesh_dimension, sent.operation) == ("tensor", "all_reduce")
        assert (sent.count, sent.bytes) == (count + 3, BYTES * (messages * SPEC.hidden_size + 3 * TOKENS + 1))


@pytest.mark.parametrize("method", METHODS)
def test_tensor_parallel_ranks_divide_prefixes_alone(measure: Measure, method: str) -> None:
    rank = measure(**METHODS[method], tensor_parallel_size=2, micro_batch_size=8).ranks[0]
    own = TRAINED[method] // (2 if method == "prefix" else 1)
    assert rank.tag_peak_bytes["optimizer_state"] == 8 * own + STEP_COUNTER


def test_a_stage_without_the_prompt_has_no_states(measure: Measure) -> None:
    first, last = measure(**METHODS["prompt"], pipeline_parallel_size=2, pipeline_split="even", micro_batch_size=4).ranks
    a = TRAINED["prompt"]
    assert first.tag_peak_bytes["optimizer_state"] == 8 * a + STEP_COUNTER
    assert last.tag_peak_bytes.get("optimizer_state", 0) == last.tag_peak_bytes.get("gradients", 0) == 0


def test_a_prompt_makes_what_stages_hand_on_longer(measure: Measure) -> None:
    def sent(**knobs: Any) -> list[int]:
        ranks = measure(**knobs, pipeline_parallel_size=2, pipeline_split="even", micro_batch_size=4).ranks
        return [count.bytes for rank in ranks for count in rank.collectives if count.operation == "send"]

    assert sent(prompt_length=4) == [TOKENS * 20 // 16 * SPEC.hidden_size * BYTES] * 2
    assert sent(prefix_length=4) == [TOKENS * SPEC.hidden_size * BYTES] * 2


def test_offloaded_parameters_take_the_frozen_shares_along(measure: Measure) -> None:
    rank = measure(**SHARDED, **METHODS["prompt"], offload_param="cpu").ranks[0]
    assert rank.host_memory_bytes == BYTES * (P + TRAINED["prompt"]) // RANKS


def built(spec: ModelSpec = SPEC, **knobs: int) -> Transformer:
    return build_transformer(adapted(spec, TrialConfig().replace(knobs)), 16, 0, torch.float64)


def test_the_first_step_is_that_of_the_model_without_bottlenecks() -> None:
    batch = text_data(WORKLOAD, SPEC.vocab_size).global_batch(0)
    assert built(adapter_size=4)(**batch).item() == built()(**batch).item()


@pytest.mark.parametrize("method", METHODS)
def test_nothing_else_is_trained(method: str) -> None:
    model = built(**METHODS[method])
    trained = [value for value in model.parameters() if value.requires_grad]
    assert sum(value.numel() for value in trained) == TRAINED[method]
    assert sum(value.numel() for value in model.parameters()) == P + TRAINED[method]
    model(**text_data(WORKLOAD, SPEC.vocab_size).global_batch(0)).backward()
    assert all(value.grad is not None for value in trained)


@pytest.mark.parametrize("window", [0, 6])
def test_every_token_sees_the_prefix_and_none_a_later_token(window: int) -> None:
    model = built(dataclasses.replace(SPEC, sliding_window=window), prefix_length=4)
    (block, *_), x = model.layers(), torch.randn(1, 16, 64, dtype=torch.float64)
    rotary = (model.rotary_cosines.double(), model.rotary_sines.double())

    def gives(values: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = block(values, rotary).detach()
        return given

    before = gives(x)
    later = x.clone()
    later[:, 10] += 1.0
    assert torch.equal(gives(later)[:, :10], before[:, :10])
    with torch.no_grad():
        block.attention.prefix.values[:, 0] += 1.0  # type: ignore[union-attr]
    assert bool((gives(x) != before).any(dim=-1).all())


@pytest.mark.parametrize("position", [Position.ROTARY, Position.LEARNED])
def test_a_prompt_is_as_tokens_before_the_others(position: Position) -> None:
    """Of the rows of real tokens, where positions are rotated; learned positions are of the tokens alone."""
    spec = dataclasses.replace(SPEC, position=position)
    model, plain = built(spec, prompt_length=4), build_transformer(spec, 20, 0, torch.float64)
    batch = text_data(Workload(global_batch_size=2, sequence_length=20), SPEC.vocab_size).global_batch(0)
    first, rest = batch["tokens"][:1].split((4, 16), dim=1)
    embedding, table = model.embedding, plain.embedding
    assert embedding is not None and embedding.prompt is not None and table is not None
    with torch.no_grad():
        embedding.prompt.rows.copy_(table.tokens(first)[0])
    given = embedding(rest, model.places)
    assert given.shape == (1, 20, 64)
    if position is Position.LEARNED:
        assert embedding.positions is not None
        assert torch.equal(given[:, :4], embedding.prompt.rows[None])
        assert torch.equal(given[:, 4:], embedding.tokens(rest) + embedding.positions.weight[:16])
        return
    hidden = plain.embedding(batch["tokens"][:1], plain.places)
    for block in plain.layers():
        hidden = block(hidden, (plain.rotary_cosines.double(), plain.rotary_sines.double()))
    wanted = plain.head(hidden[:, 4:], batch["labels"][:1, 4:])
    assert model(rest, batch["labels"][:1, 4:]).item() == pytest.approx(wanted.item(), rel=1e-12)
