"""Collectives, bytes and peak memory of a step against closed forms, measured on two real ranks through the local runner."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from two_ranks import RANKS, Measure, measuring

from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from tests.sampling import sampled

BYTES = 4  # fp32
SPEC = ModelSpec(
    name="accounting", family="llama", num_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ffn_hidden_size=96, vocab_size=256, sequence_length=16,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=8, sequence_length=16)

P = SPEC.parameter_count
BLOCK = SPEC.layer_parameters
EMBEDDING = SPEC.vocab_size * SPEC.hidden_size
HEAD = EMBEDDING + SPEC.hidden_size
NORMS = (2 * SPEC.num_layers + 1) * SPEC.hidden_size
UNITS = SPEC.num_layers + 2
LARGEST = EMBEDDING
"""Elements of the largest parameter."""
WAITING = 2 * LARGEST
"""Of fresh gradients that are not in their bucket yet: neighbours up to one parameter wait for one another, at two places."""


@pytest.fixture(scope="module")
def measure(forked_ranks: None) -> Iterator[Measure]:
    with measuring(SPEC, WORKLOAD) as run:
        yield run


@dataclass(frozen=True)
class Row:
    """Knobs and what a step must send: operation -> (count, elements of the full messages)."""

    knobs: dict[str, Any]
    expected: dict[str, tuple[int, int]]


NORM = (1, 1)
"""The all-reduce of the squared gradient norm where shards are clipped."""
SHARDED = {"prefetch_bucket_size": 0, "param_persistence_threshold": 0, "zero_stage": 3}
GATHERS = 2 * UNITS - 2
"""Each unit forward and backward, but the head once, since its backward follows its forward, and the embedding once, since
backward of a table that is looked up does not read it."""
GATHERED = 2 * P - HEAD - EMBEDDING
TABLE = [
    # Stage 0: every gradient once, in as many all-reduces as buckets; accumulation sends nothing more.
    Row({}, {"all_reduce": (1, P)}),
    Row({"micro_batch_size": 1}, {"all_reduce": (1, P)}),
    Row({"reduce_bucket_size": EMBEDDING + BLOCK}, {"all_reduce": (4, P)}),
    Row({"reduce_bucket_size": 1}, {"all_reduce": (3 + 9 * SPEC.num_layers, P)}),
    Row({"contiguous_gradients": False}, {"all_reduce": (1, P)}),
    Row({"overlap_comm": False, "reduce_bucket_size": 1}, {"all_reduce": (3 + 9 * SPEC.num_layers, P)}),
    # Stage 1: a reduce-scatter instead, and updated parameters gathered back: 2P in all.
    Row({"zero_stage": 1}, {"reduce_scatter": (1, P), "all_gather": (1, P), "all_reduce": NORM}),
    Row({"zero_stage": 1, "micro_batch_size": 1}, {"reduce_scatter": (1, P), "all_gather": (1, P), "all_reduce": NORM}),
    Row(
        {"zero_stage": 1, "allgather_bucket_size": 1},
        {"reduce_scatter": (1, P), "all_gather": (3 + 9 * SPEC.num_layers, P), "all_reduce": NORM},
    ),
    # Beside the next forward: the same, a gather a unit, and none of two.
    Row(
        {"zero_stage": 1, "overlap_param_gather": True},
        {"reduce_scatter": (1, P), "all_gather": (UNITS, P), "all_reduce": NORM},
    ),
    Row(
        {"zero_stage": 2, "overlap_param_gather": True, "allgather_bucket_size": 1, "micro_batch_size": 2},
        {"reduce_scatter": (2, 2 * P), "all_gather": (3 + 9 * SPEC.num_layers, P), "all_reduce": NORM},
    ),
    # Stage 2: (m + 1) P, or 2P with the reduction deferred to the last micro-batch.
    Row({"zero_stage": 2}, {"reduce_scatter": (1, P), "all_gather": (1, P), "all_reduce": NORM}),
    Row({"zero_stage": 2, "micro_batch_size": 1}, {"reduce_scatter": (4, 4 * P), "all_gather": (1, P), "all_reduce": NORM}),
    Row(
        {"zero_stage": 2, "micro_batch_size": 1, "defer_gradient_reduction": True},
        {"reduce_scatter": (1, P), "all_gather": (1, P), "all_reduce": NORM},
    ),
    Row(
        {"zero_stage": 2, "micro_batch_size": 2, "reduce_bucket_size": EMBEDDING + BLOCK},
        {"reduce_scatter": (2 * 4, 2 * P), "all_gather": (1, P), "all_reduce": NORM},
    ),
    # Stage 3: 3mP less the second gathers of head and embedding.
    Row(SHARDED, {"reduce_scatter": (1, P), "all_gather": (GATHERS, GATHERED), "all_reduce": NORM}),
    Row(
        {**SHARDED, "micro_batch_size": 2},
        {"reduce_scatter": (2, 2 * P), "all_gather": (2 * GATHERS, 2 * GATHERED), "all_reduce": NORM},
    ),
    # Kept whole between forward and backward: one gather a unit.
    Row(
        {**SHARDED, "reshard_after_forward": False},
        {"reduce_scatter": (1, P), "all_gather": (UNITS, P), "all_reduce": NORM},
    ),
    # Norms persist: gathered once a step, with their unit; their second gather is saved (the head had none anyway).
    Row(
        {**SHARDED, "param_persistence_threshold": SPEC.hidden_size},
        {"reduce_scatter": (1, P), "all_gather": (GATHERS, GATHERED - (NORMS - SPEC.hidden_size)), "all_reduce": NORM},
    ),
    # Everything persists: one gather a unit and step, whatever the accumulation.
    Row(
        {**SHARDED, "param_persistence_threshold": P, "micro_batch_size": 2},
        {"reduce_scatter": (2, 2 * P), "all_gather": (UNITS, P), "all_reduce": NORM},
    ),
    # Room for one block ahead: the first comes with the embedding, the last is kept over the head, the next is on its way.
    Row(
        {**SHARDED, "prefetch_bucket_size": BLOCK},
        {"reduce_scatter": (1, P), "all_gather": (GATHERS - 2, GATHERED - BLOCK), "all_reduce": NORM},
    ),
    # Room for two: first and second with the embedding, third, fourth, head, and for backward second and first.
    Row(
        {**SHARDED, "prefetch_bucket_size": 2 * BLOCK},
        {"reduce_scatter": (1, P), "all_gather": (6, P + 2 * BLOCK), "all_reduce": NORM},
    ),
    # The least room: one unit is gathered ahead. The first block comes with the embedding.
    Row(
        {**SHARDED, "prefetch_bucket_size": 1},
        {"reduce_scatter": (1, P), "all_gather": (GATHERS - 1, GATHERED), "all_reduce": NORM},
    ),
    # No room for another live parameter: prefetch never starts.
    Row(
        {**SHARDED, "prefetch_bucket_size": P, "max_live_parameters": 1},
        {"reduce_scatter": (1, P), "all_gather": (GATHERS, GATHERED), "all_reduce": NORM},
    ),
]


each_row = pytest.mark.parametrize(
    "row", sampled(TABLE, every=24), ids=lambda row: ",".join(f"{k}={v}" for k, v in row.knobs.items()) or "default"
)


@pytest.mark.prove
@each_row
def test_collectives_equal_the_closed_form(measure: Measure, row: Row) -> None:
    result = measure(**row.knobs)
    for rank in result.ranks:
        sent = {count.operation: (count.count, count.bytes) for count in rank.collectives}
        assert sent == {name: (count, elements * BYTES) for name, (count, elements) in row.expected.items()}


def test_every_parameter_divides_so_that_no_padding_blurs_the_forms() -> None:
    assert not any(size % RANKS for size in (EMBEDDING, BLOCK, SPEC.hidden_size))


def test_bf16_reduction_halves_the_bytes(measure: Measure) -> None:
    sent = {count.operation: count.bytes for count in measure(reduce_dtype="bf16").ranks[0].collectives}
    assert sent == {"all_reduce": 2 * P}


def test_bf16_parameters_travel_in_two_bytes_and_gradients_in_four(measure: Measure) -> None:
    sent = {count.operation: count.bytes for count in measure(zero_stage=1, precision="bf16").ranks[0].collectives}
    assert sent == {"reduce_scatter": 4 * P, "all_gather": 2 * P, "all_reduce": BYTES}


# Memory. Optimizer state counts the master where it is not the parameters themselves; AdamW's step counter is 4 bytes.
STEP_COUNTER = 4


@pytest.mark.prove
@pytest.mark.parametrize(
    ("stage", "optimizer", "gradients"),
    [
        (0, 8 * P, 4 * P),
        # One bucket holds every gradient before it is sent: stage 1 has full gradients and the share.
        (1, 12 * P // RANKS, 4 * P + 4 * P // RANKS),
        (2, 12 * P // RANKS, 4 * P // RANKS),
        (3, 12 * P // RANKS, 4 * P // RANKS),
    ],
)
def test_states_equal_the_closed_form(measure: Measure, stage: int, optimizer: int, gradients: int) -> None:
    rank = measure(zero_stage=stage, prefetch_bucket_size=0, param_persistence_threshold=0).ranks[0]
    assert rank.tag_peak_bytes["optimizer_state"] == optimizer + STEP_COUNTER
    # The share of the reduced gradient, and fresh gradients that wait for their neighbours.
    assert gradients <= rank.tag_peak_bytes["gradients"] <= gradients + 4 * WAITING


@pytest.mark.prove
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_whole_below_stage_3(measure: Measure, stage: int) -> None:
    assert measure(zero_stage=stage).ranks[0].tag_peak_bytes["parameters"] == BYTES * P


def test_stage_3_holds_the_units_in_use(measure: Measure) -> None:
    """At a change of units in backward, the one that begins and what autograd still needs of the one that ends."""
    held = measure(**SHARDED).ranks[0].tag_peak_bytes["parameters"]
    largest = max(HEAD, BLOCK)
    assert BYTES * largest <= held <= BYTES * (HEAD + BLOCK)


@pytest.mark.prove
def test_stage_3_kept_after_forward_holds_every_parameter(measure: Measure) -> None:
    assert measure(**SHARDED, reshard_after_forward=False).ranks[0].tag_peak_bytes["parameters"] == BYTES * P


@pytest.mark.nightly
def test_held_gradients_are_full_until_the_last_micro_batch(measure: Measure) -> None:
    """Stage 1, and stage 2 deferred: full gradients and the share; stage 2 at each micro-batch: the share alone."""
    held = {"micro_batch_size": 1, "contiguous_gradients": True}
    for knobs in ({"zero_stage": 1}, {"zero_stage": 2, "defer_gradient_reduction": True}):
        peak = measure(**held, **knobs).ranks[0].tag_peak_bytes["gradients"]
        assert 4 * P + 4 * P // RANKS <= peak <= 4 * P + 4 * P // RANKS + 4 * WAITING
    assert measure(**held, zero_stage=2).ranks[0].tag_peak_bytes["gradients"] <= 4 * P // RANKS + 4 * WAITING


@pytest.mark.nightly
def test_bf16_states_equal_the_closed_form(measure: Measure) -> None:
    """2P parameters; fp32 master and moments 12P; fp32 gradients 4P and fresh bf16 gradients."""
    rank = measure(precision="bf16").ranks[0]
    assert rank.tag_peak_bytes["parameters"] == 2 * P
    assert rank.tag_peak_bytes["optimizer_state"] == 12 * P + STEP_COUNTER
    assert 4 * P <= rank.tag_peak_bytes["gradients"] <= 4 * P + 2 * WAITING


@pytest.mark.nightly
def test_reduce_buckets_bound_the_communication_buffers(measure: Measure) -> None:
    """Stage 2: one bucket fills while two are on the way, each with the backend's own copy; a late bucket waits for no one."""
    whole = measure(zero_stage=2, allgather_bucket_size=1).ranks[0].tag_peak_bytes["buffers"]
    small = measure(zero_stage=2, allgather_bucket_size=1, reduce_bucket_size=1).ranks[0].tag_peak_bytes["buffers"]
    assert whole >= BYTES * P
    assert small < BYTES * 8 * LARGEST < whole


@each_row
def test_tags_sum_to_the_peak_on_every_rank(measure: Measure, row: Row) -> None:
    for rank in measure(**row.knobs).ranks:
        assert sum(rank.memory_by_tag.values()) == rank.peak_memory_bytes
        assert all(rank.memory_by_tag[tag] <= rank.tag_peak_bytes[tag] for tag in rank.memory_by_tag)


@pytest.mark.nightly
def test_checkpointing_lowers_activations(measure: Measure) -> None:
    peaks = [measure(activation_checkpointing=kind).ranks[0].tag_peak_bytes["activations"] for kind in ("full", "none")]
    assert peaks[0] < peaks[1]
