"""FLOPs that a step executes, against the products of the model written down by hand."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from executor.engine import EngineSession, RankContext
from executor.engines.native.engine import NativeEngine
from executor.measurement import flop_counter
from executor.measurement.flop_counter import FlopCounter
from executor.measurement.flops import flops_utilization, hardware_tflops_per_device, tflops_per_device
from executor.runners.local import LocalRunner
from search_spaces.models.model import HeadNorm, ModelSpec, Norm, NormPlace, Position
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

TOKENS, SAMPLES = 16, 4
WORKLOAD = Workload(global_batch_size=SAMPLES, sequence_length=TOKENS)
CONTEXT = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
LLAMA = ModelSpec(
    name="llama", family="llama", num_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ffn_hidden_size=96, vocab_size=256, sequence_length=TOKENS,
)  # fmt: skip
GPT2 = ModelSpec(
    name="gpt2", family="gpt2", num_layers=2, hidden_size=48, num_attention_heads=3, num_key_value_heads=3, head_dim=16,
    ffn_hidden_size=192, vocab_size=256, sequence_length=TOKENS, tied_embeddings=True, norm=Norm.LAYERNORM, gated_mlp=False,
    qkv_bias=True, attention_output_bias=True, mlp_bias=True, position=Position.LEARNED, activation="gelu",
)  # fmt: skip
POST_NORM = ModelSpec(
    name="opt", family="opt", num_layers=2, hidden_size=48, num_attention_heads=3, num_key_value_heads=3, head_dim=16,
    ffn_hidden_size=64, vocab_size=256, sequence_length=TOKENS, norm=Norm.LAYERNORM, gated_mlp=False, norm_place=NormPlace.SUM,
    embedding_size=32, position=Position.LEARNED, position_offset=2, activation="relu",
)  # fmt: skip
MIXTRAL = ModelSpec(
    name="mixtral", family="mixtral", num_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    ffn_hidden_size=48, vocab_size=256, sequence_length=TOKENS, num_experts=4, experts_per_token=2,
)  # fmt: skip


@contextlib.contextmanager
def built(spec: ModelSpec, **knobs: Any) -> Iterator[EngineSession]:
    session = NativeEngine().build(CONTEXT, spec, TrialConfig(micro_batch_size=2).replace(knobs), WORKLOAD)
    try:
        for step in range(3):
            session.prepare(step)
            if step < 2:
                session.train_step()
        yield session
    finally:
        session.close()


def executed(spec: ModelSpec, **knobs: Any) -> int:
    with built(spec, **knobs) as session, FlopCounter() as counter:
        session.train_step()
    assert counter.total is not None
    return counter.total


def product(inputs: int, outputs: int) -> int:
    """Forward FLOPs of a matrix over all tokens of the step."""
    return 2 * SAMPLES * TOKENS * inputs * outputs


def attention(spec: ModelSpec) -> int:
    """Scores and mixed values of a layer, what the causal mask hides included."""
    return 2 * 2 * SAMPLES * TOKENS * TOKENS * spec.num_attention_heads * spec.head_dim


def down(spec: ModelSpec) -> int:
    return product(spec.ffn_hidden_size, spec.hidden_size) * (spec.experts_per_token or 1)


def linear(spec: ModelSpec) -> int:
    """Forward FLOPs of a layer's matrices."""
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    mlp = (3 if spec.gated_mlp else 2) * down(spec)
    return product(spec.hidden_size, 2 * queries + 2 * keys) + mlp + product(spec.hidden_size, spec.num_experts)


def logits(spec: ModelSpec) -> int:
    return product(spec.embedding_size or spec.hidden_size, spec.vocab_size)


def once(spec: ModelSpec) -> int:
    """A step in which nothing runs again.

    Each matrix three times (its product, and the gradients of its input and of itself), attention 2 products forward and 5
    backward, since the fused kernel keeps no scores; looking up the embedding costs none.
    """
    projections = 2 * product(spec.embedding_size, spec.hidden_size)
    return 3 * (spec.num_layers * linear(spec) + logits(spec) + projections) + spec.num_layers * attention(spec) * 7 // 2


@pytest.mark.parametrize("spec", [LLAMA, GPT2, POST_NORM, MIXTRAL], ids=lambda spec: spec.name)
def test_without_checkpointing_each_product_counts_once_forward_and_twice_backward(spec: ModelSpec) -> None:
    assert executed(spec) == once(spec)


def test_attention_within_chunks_counts_the_pairs_of_each_chunk() -> None:
    """In the first of two layers, which is dense; the other has one expert for each token, and a shared one."""
    spec = dataclasses.replace(
        MIXTRAL, experts_per_token=1, sigmoid_routing=True, normalised_routing=False, weighted_inputs=True, sliding_window=4,
        head_norm=HeadNorm.ROTATED, rotated_layers=(True, False), query_temperature=0.1, temperature_span=4,
        chunked_attention=True, whole_layers=(False, True), shared_expert_size=40, dense_layers=(True, False),
        dense_ffn_size=80,
    )  # fmt: skip
    widths = spec.ffn_hidden_size + spec.shared_expert_size + spec.dense_ffn_size
    matrices = 2 * product(32, 4 * 32) + 3 * product(32, widths) + product(32, spec.num_experts) + logits(spec)
    assert executed(spec) == 3 * matrices + attention(spec) * 7 // 2 * (1 + spec.sliding_window / TOKENS)
    assert spec.attended(TOKENS) == (spec.sliding_window + TOKENS) / 2


@pytest.mark.parametrize(
    "knobs", sampled([{"zero_stage": 3}, {"precision": "bf16"}, {"precision": "fp64"}, {"micro_batch_size": 4}], every=3)
)
def test_what_computes_the_same_counts_the_same(knobs: dict[str, Any]) -> None:
    assert executed(LLAMA, **knobs) == once(LLAMA)


def test_full_checkpointing_adds_one_forward_of_the_blocks_but_its_last_product() -> None:
    """Nothing in backward needs the result of the block's last product: the checkpoint stops before it."""
    again = LLAMA.num_layers * (linear(LLAMA) + attention(LLAMA) - down(LLAMA))
    assert executed(LLAMA, activation_checkpointing="full") == once(LLAMA) + again
    assert executed(LLAMA, activation_checkpointing="full", zero_stage=3) == once(LLAMA) + again


def test_checkpointing_of_some_blocks_adds_those_alone() -> None:
    again = linear(LLAMA) + attention(LLAMA) - down(LLAMA)
    assert executed(LLAMA, activation_checkpointing="full", checkpoint_every_k=3) == once(LLAMA) + again


def test_selective_checkpointing_runs_no_product_again() -> None:
    assert executed(LLAMA, activation_checkpointing="selective") == once(LLAMA)


def test_full_checkpointing_runs_a_block_whole_that_ends_with_a_norm() -> None:
    again = POST_NORM.num_layers * (linear(POST_NORM) + attention(POST_NORM))
    assert executed(POST_NORM, activation_checkpointing="full") == once(POST_NORM) + again


def test_a_chunked_loss_makes_its_logits_once_but_in_fp16() -> None:
    assert executed(LLAMA, loss_chunk_size=8) == once(LLAMA)
    assert executed(LLAMA, loss_chunk_size=8, precision="fp16") == once(LLAMA) + logits(LLAMA)


def test_a_counted_step_computes_what_an_uncounted_one_does() -> None:
    with built(LLAMA) as session, FlopCounter():
        counted = session.train_step()
    with built(LLAMA) as session:
        assert session.train_step() == counted


DEEPER = dataclasses.replace(LLAMA, num_layers=4)
SEEN_BY_TWO = 10 / 16
"""Share of the keys that two context-parallel ranks look at, whose tokens are chunks 0 and 3, and 1 and 2, of four."""
LAYOUTS: dict[str, tuple[dict[str, Any], float]] = {
    "data": ({}, once(DEEPER)),
    "tensor": ({"tensor_parallel_size": 2}, once(DEEPER)),
    "sequence": ({"tensor_parallel_size": 2, "sequence_parallel": True}, once(DEEPER)),
    "pipeline": ({"pipeline_parallel_size": 2}, once(DEEPER)),
    "zbv": ({"pipeline_parallel_size": 2, "pipeline_schedule": "zbv", "virtual_stages": 2}, once(DEEPER)),
    "context": ({"context_parallel_size": 2}, once(DEEPER) - 4 * attention(DEEPER) * 3.5 * (1 - SEEN_BY_TWO)),
}


@pytest.fixture(scope="module")
def ranks(forked_ranks: None) -> Iterator[LocalRunner]:
    with LocalRunner(2, device="cpu") as runner:
        yield runner


@pytest.mark.prove
@pytest.mark.parametrize("layout", sampled(LAYOUTS, every=2))
def test_ranks_execute_together_what_one_does_alone(ranks: LocalRunner, layout: str) -> None:
    knobs, expected = LAYOUTS[layout]
    request = TrialRequest(
        attempt=layout, model=DEEPER, config=TrialConfig().replace(knobs), workload=WORKLOAD, world_size=2,
        fidelity=Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2, measure_memory=False),
    )  # fmt: skip
    result = ranks.run(request)
    assert result.hardware_tflops_per_device is not None, result.message
    seconds = sum(result.step_seconds) / len(result.step_seconds)
    assert 2 * result.hardware_tflops_per_device * 1e12 * seconds == pytest.approx(expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_backward_counts_where_autograd_runs_it_in_a_thread_of_the_device() -> None:
    model, x = nn.Linear(8, 16, device="cuda"), torch.ones(4, 8, device="cuda", requires_grad=True)
    with FlopCounter() as counter:
        model(x).sum().backward()
    assert counter.total == 3 * 2 * 4 * 8 * 16


def test_under_inference_mode_what_is_made_of_others_counts() -> None:
    with FlopCounter() as counter, torch.inference_mode():
        nn.Linear(8, 16)(torch.ones(4, 8))
    assert counter.total == 2 * 4 * 8 * 16


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_count_each_matrix_for_every_row(kind: type[nn.LSTM], gates: int) -> None:
    """oneDNN has an LSTM's layer as one operator, in which the gradients of the samples are computed too."""
    layers, samples, steps = kind(16, 32, num_layers=2, batch_first=True), 2, 5
    with FlopCounter() as counter:
        out, _ = layers(torch.ones(samples, steps, 16, requires_grad=True))
        forward = counter.total
        out.sum().backward()
    matrices = gates * 32 * ((16 + 32) + (32 + 32))
    assert forward == 2 * samples * steps * matrices
    assert counter.total is not None
    # The state before the first step needs no gradient: where steps are products of their own, one of them has none.
    assert 3 * forward - 2 * 2 * samples * 2 * gates * 32 * 32 <= counter.total <= 3 * forward


@torch.library.custom_op("mine::multiply", mutates_args=())
def multiply(x: torch.Tensor) -> torch.Tensor:
    return x @ x


SQUARE = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("compute", "flops"),
    [
        (lambda: torch.mv(SQUARE, SQUARE[0]) + torch.dot(SQUARE[0], SQUARE[0]), 2 * 16 + 2 * 4),
        (lambda: torch.addmv(SQUARE[0], SQUARE, SQUARE[0]), 2 * 16),
        (lambda: torch.zeros(4, 4).addmm_(SQUARE, SQUARE), 2 * 64),
        (lambda: nn.Bilinear(4, 3, 2)(SQUARE, torch.ones(4, 3)), 4 * 4 * 4 * 3 * 2),
        (lambda: torch._grouped_mm(SQUARE, torch.ones(2, 4, 8), offs=torch.tensor([1, 4], dtype=torch.int32)), 2 * 4 * 4 * 8),
        (lambda: torch._grouped_mm(torch.ones(2, 4, 4), torch.ones(4, 8), offs=torch.tensor([4, 8], dtype=torch.int32)),
         2 * 4 * 4 * 8),
        (lambda: nn.functional.conv_transpose2d(torch.ones(1, 2, 3, 3), torch.ones(2, 5, 2, 2)), 2 * 9 * 2 * 5 * 4),
        (lambda: torch.einsum("ij,jk->ik", SQUARE, SQUARE), 2 * 64),
        (lambda: torch.linalg.vector_norm(SQUARE) + nn.functional.interpolate(SQUARE[None, None], scale_factor=2).sum(), 0),
        (lambda: multiply(SQUARE), None),
        (lambda: torch.sparse.mm(SQUARE.to_sparse(), SQUARE), None),
        (lambda: torch.fft.rfft(SQUARE), None),
        (lambda: torch.linalg.inv(SQUARE + torch.eye(4)), None),
        (lambda: (SQUARE @ SQUARE, torch.cdist(SQUARE, SQUARE, p=1.0)), None),
    ],
)  # fmt: skip
def test_products_are_counted_or_the_total_is_unknown(compute: Callable[[], object], flops: int | None) -> None:
    with FlopCounter() as counter:
        compute()
    assert counter.total == flops


def test_a_formula_that_fails_ends_the_count_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> int:
        raise AssertionError("unforeseen")

    monkeypatch.setattr(flop_counter, "formula_of", lambda operator: fails if operator is torch.ops.aten.mm.default else None)
    with FlopCounter() as counter:
        result = torch.ones(2, 3) @ torch.ones(3, 2)
    assert result.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert counter.total is None
    assert hardware_tflops_per_device([1, None], 1.0) is None


def test_shares_of_the_peak() -> None:
    assert hardware_tflops_per_device([10**12, 3 * 10**12], 2.0) == 1.0
    assert flops_utilization(1.0, 4e12) == 0.25
    assert flops_utilization(1.0, None) is None
    assert flops_utilization(None, 4e12) is None


@pytest.mark.prove
def test_the_devices_execute_at_least_what_the_model_needs() -> None:
    """HFU is at least MFU: by PaLM's convention attention's backward is twice its forward, and nothing runs again."""
    rate = SAMPLES / 2.0
    needed = tflops_per_device(LLAMA, WORKLOAD, rate, 1)
    plain = hardware_tflops_per_device([executed(LLAMA)], 2.0)
    again = hardware_tflops_per_device([executed(LLAMA, activation_checkpointing="full")], 2.0)
    assert plain is not None
    assert again is not None
    assert needed <= plain * 1.005  # the convention also counts 6 FLOPs for each weight of a norm
    assert again > 1.2 * needed
