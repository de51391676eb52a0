"""Low-rank adapters: what a step sends and holds against closed forms, on two real ranks; what a model with them computes."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from two_ranks import RANKS, Measure, measuring

from executor.batches import text_data
from executor.parallel.model import build_transformer
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import adapted, layer_adapter_elements
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.nightly  # `make oldest` runs them too

BYTES = 4  # fp32
STEP_COUNTER = 4
SPEC = ModelSpec(
    name="adapters", family="llama", num_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ffn_hidden_size=96, vocab_size=256, sequence_length=16,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=8, sequence_length=16)
LORA = {"lora_rank": 4, "lora_targets": "attention"}
ADAPTED = adapted(SPEC, TrialConfig().replace(LORA))

P, A = SPEC.parameter_count, ADAPTED.adapter_parameters
BLOCK = SPEC.layer_parameters + A // SPEC.num_layers
EMBEDDING = SPEC.vocab_size * SPEC.hidden_size
HEAD = EMBEDDING + SPEC.hidden_size
LARGEST = 4 * SPEC.hidden_size
"""Elements of the largest factor: the most that one gradient adds before it is moved into its bucket."""
UNITS = SPEC.num_layers + 2
NORM = (1, 1)
SHARDED = {"zero_stage": 3, "prefetch_bucket_size": 0, "param_persistence_threshold": 0}
TENSOR = {"tensor_parallel_size": 2, "micro_batch_size": 8}


@pytest.fixture(scope="module")
def measure(forked_ranks: None) -> Iterator[Measure]:
    with measuring(SPEC, WORKLOAD, **LORA) as run:
        yield run


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, {"all_reduce": (1, A)}),
        ({"zero_stage": 1}, {"reduce_scatter": (1, A), "all_gather": (1, A), "all_reduce": NORM}),
        ({"zero_stage": 2, "micro_batch_size": 2}, {"reduce_scatter": (2, 2 * A), "all_gather": (1, A), "all_reduce": NORM}),
        # Stage 3: frozen matrices travel with the adapters, for backward too, and are never reduced.
        (
            {**SHARDED, "micro_batch_size": 2},
            {
                "reduce_scatter": (2, 2 * A),
                "all_gather": (2 * (2 * UNITS - 2), 2 * (2 * (P + A) - HEAD - EMBEDDING)),
                "all_reduce": NORM,
            },
        ),
        # Everything persists: what is frozen for good, adapters until the update.
        (
            {**SHARDED, "param_persistence_threshold": P, "micro_batch_size": 2},
            {"reduce_scatter": (2, 2 * A), "all_gather": (SPEC.num_layers, A), "all_reduce": NORM},
        ),
    ],
    ids=("0", "1", "2", "3", "3 persistent"),
)
def test_data_parallel_ranks_send_adapters(measure: Measure, knobs: dict[str, Any], expected: dict[str, Any]) -> None:
    for rank in measure(**knobs).ranks:
        sent = {count.operation: (count.count, count.bytes) for count in rank.collectives}
        assert sent == {name: (count, elements * BYTES) for name, (count, elements) in expected.items()}


@pytest.mark.parametrize(("targets", "needless"), [("attention", 1), ("mlp", 2)])
def test_tensor_parallel_ranks_send_nothing_more_but_the_summands(measure: Measure, targets: str, needless: int) -> None:
    """Of the first layer no gradient goes back beyond its first adapter."""
    whole, _ = layer_adapter_elements(adapted(SPEC, TrialConfig(lora_rank=4, lora_targets=targets)))
    tokens = 8 * SPEC.sequence_length
    message, loss = tokens * SPEC.hidden_size, (2, 3 * tokens)
    layers = 4 * SPEC.num_layers - needless + 2  # with the embedding forward and the head backward
    for rank in measure(**TENSOR, lora_targets=targets).ranks:
        (sent,) = rank.collectives
        summands, norm = (1, SPEC.num_layers * whole), NORM
        elements = layers * message + loss[1] + summands[1] + norm[1]
        assert (sent.mesh_dimension, sent.operation) == ("tensor", "all_reduce")
        assert (sent.count, sent.bytes) == (layers + loss[0] + summands[0] + norm[0], elements * BYTES)


@pytest.mark.parametrize(
    ("stage", "optimizer", "gradients"),
    [(3, 12 * A // 2, 2 * A), (0, 8 * A, 4 * A), (1, 12 * A // 2, 6 * A), (2, 12 * A // 2, 2 * A)],
)
def test_frozen_parameters_have_no_states(measure: Measure, stage: int, optimizer: int, gradients: int) -> None:
    knobs = SHARDED if stage == 3 else {"zero_stage": stage}
    rank = measure(**{**knobs, "micro_batch_size": 4}).ranks[0]
    assert rank.tag_peak_bytes["optimizer_state"] == optimizer + STEP_COUNTER
    assert gradients <= rank.tag_peak_bytes["gradients"] <= gradients + 2 * BYTES * LARGEST
    held = rank.tag_peak_bytes["parameters"]
    if stage < 3:
        assert held == BYTES * (P + A)
    else:  # the shares of what is frozen, and the units in use
        assert BYTES * max(HEAD, BLOCK) <= held - BYTES * P // RANKS <= BYTES * (HEAD + BLOCK)


def test_bf16_keeps_a_master_of_adapters_alone(measure: Measure) -> None:
    rank = measure(precision="bf16").ranks[0]
    assert rank.tag_peak_bytes["parameters"] == 2 * (P + A)
    assert rank.tag_peak_bytes["optimizer_state"] == 12 * A + STEP_COUNTER


def test_offloaded_parameters_take_the_frozen_shares_along(measure: Measure) -> None:
    rank = measure(**SHARDED, offload_param="cpu").ranks[0]
    assert rank.tag_peak_bytes["parameters"] <= BYTES * (HEAD + BLOCK)
    assert rank.host_memory_bytes == BYTES * (P + A) // RANKS


MATRICES = SPEC.parameter_count - 2 * EMBEDDING - SPEC.hidden_size * (2 * SPEC.num_layers + 1)
"""Elements of the layers' matrices: all but tables and norms."""
BITS = {"int8": 8 / 8 + 4 / 64, "nf4": 4 / 8 + 4 / 64}
"""Bytes of a quantised element, its share of a scale included."""


@pytest.mark.parametrize(("stage", "dtype"), [(stage, dtype) for stage in (1, 0, 2) for dtype in BITS])
def test_quantised_matrices_lie_whole_below_stage_3(measure: Measure, stage: int, dtype: str) -> None:
    rank = measure(zero_stage=stage, frozen_dtype=dtype).ranks[0]
    whole = BYTES * (P + A - MATRICES) + BITS[dtype] * MATRICES
    largest = BYTES * SPEC.hidden_size * SPEC.ffn_hidden_size
    assert whole <= rank.tag_peak_bytes["parameters"] <= whole + largest
    assert rank.tag_peak_bytes["optimizer_state"] == (8 * A if stage == 0 else 12 * A // 2) + STEP_COUNTER
    sent = {count.operation: count.bytes for count in rank.collectives}
    assert sent["all_reduce" if stage == 0 else "reduce_scatter"] == BYTES * A


@pytest.mark.parametrize("dtype", BITS)
def test_quantised_matrices_are_gathered_as_bytes(measure: Measure, dtype: str) -> None:
    """In collectives of their own: one more in each layer, forward and backward."""
    rank = measure(**SHARDED, frozen_dtype=dtype).ranks[0]
    sent = {count.operation: (count.count, count.bytes) for count in rank.collectives}
    once = BYTES * (2 * (P + A - MATRICES) - HEAD - EMBEDDING) + 2 * BITS[dtype] * MATRICES
    assert sent["all_gather"] == (2 * UNITS - 2 + 2 * SPEC.num_layers, once)
    assert sent["reduce_scatter"] == (1, BYTES * A)
    shares = (BYTES * (P - MATRICES) + BITS[dtype] * MATRICES) / RANKS
    layer = BYTES * (BLOCK - MATRICES // SPEC.num_layers) + BITS[dtype] * MATRICES / SPEC.num_layers
    unpacked = BYTES * SPEC.hidden_size * SPEC.ffn_hidden_size
    assert BYTES * HEAD <= rank.tag_peak_bytes["parameters"] - shares <= BYTES * HEAD + layer + unpacked


def test_quantised_shares_can_lie_in_host_memory(measure: Measure) -> None:
    rank = measure(**SHARDED, offload_param="cpu", frozen_dtype="nf4").ranks[0]
    assert rank.host_memory_bytes == (BYTES * (P + A - MATRICES) + BITS["nf4"] * MATRICES) / RANKS


def test_the_first_step_is_that_of_the_model_without_adapters() -> None:
    batch = text_data(WORKLOAD, SPEC.vocab_size).global_batch(0)
    losses = [build_transformer(spec, 16, 0, torch.float64)(**batch).item() for spec in (SPEC, ADAPTED)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("experts", [0, 4])
def test_adapters_are_all_that_is_trained(experts: int) -> None:
    spec = dataclasses.replace(
        SPEC, num_experts=experts, experts_per_token=min(experts, 2), lora_rank=4, lora_targets=("gate", "down")
    )
    model = build_transformer(spec, 16, 0, torch.float32)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert all(name.endswith((".adapter.lora_a", ".adapter.lora_b")) for name in trained)
    assert sum(value.numel() for value in trained.values()) == spec.adapter_parameters
    assert sum(value.numel() for value in model.parameters()) == spec.parameter_count + spec.adapter_parameters
