"""Packed rows: attention inside of documents, and training that cannot tell them from documents in rows of their own."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession, refuse
from executor.errors import EngineRefusalError
from executor.measurement.flop_counter import FlopCounter
from executor.parallel.attention import (
    Documents,
    _plain_flex,
    attend_in_documents,
    block_mask,
    choose_attention_kernel,
    documents_in,
)
from executor.parallel.model import Transformer, build_transformer
from search_spaces.capability import Capability
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec, Norm, Position
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

LENGTHS = (16, 9, 5, 3, 2, 7, 1, 12, 4)
ROWS = ((9, 7), (5, 3, 2, 1, 5))
"""Documents of two rows, the last of them padding."""
SPEC = ModelSpec(
    name="packed", family="llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=48, vocab_size=64, sequence_length=16,
)  # fmt: skip
LEARNED = ModelSpec(
    name="learned", family="gpt2", num_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    ffn_hidden_size=48, vocab_size=64, sequence_length=16, norm=Norm.LAYERNORM, position=Position.LEARNED, gated_mlp=False,
    activation="gelu", tied_embeddings=True,
)  # fmt: skip
ROUTED = ModelSpec(
    name="routed", family="mixtral", num_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=48, vocab_size=64, sequence_length=16, num_experts=4, experts_per_token=2,
)  # fmt: skip
CPU = torch.device("cpu")


def places() -> Tensor:
    return torch.tensor([[place for length in row for place in range(length)] for row in ROWS])


def tensors(heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 16, 8), (2, heads, 16, 8), (2, heads, 16, 8)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def by_a_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    numbers = (places() == 0).cumsum(1)
    seen = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=key.shape[1] != query.shape[1])


def found_documents() -> Documents:
    return documents_in(places(), torch.float64, 8)


@pytest.mark.parametrize("kernel", ["best", "math"])
@pytest.mark.parametrize("heads", [4, 2])
def test_documents_are_attention_under_a_mask(heads: int, kernel: str) -> None:
    assert found_documents().lengths == (9, 7, 5, 3, 2, 1, 5)
    choose_attention_kernel(kernel)
    try:
        inputs = tensors(heads)
        found, wanted = attend_in_documents(*inputs, found_documents(), heads != 4), by_a_mask(*inputs)
        weights = torch.randn_like(wanted)
        gradients = [torch.autograd.grad((one * weights).sum(), inputs) for one in (found, wanted)]
    finally:
        choose_attention_kernel("best")
    assert (found - wanted).abs().max() < 1e-13
    assert max((one - other).abs().max() for one, other in zip(*gradients, strict=True)) < 1e-13


def test_chunks_are_documents_of_their_own() -> None:
    assert documents_in(places(), torch.float64, 8, chunk=4).lengths == (4, 4, 1, 4, 3, 4, 1, 3, 2, 1, 4, 1)


@pytest.mark.prove
def test_the_mask_of_flex_attention_is_of_documents() -> None:
    """Forward: on CPUs flex attention has no backward."""
    query, key, value = (x.detach() for x in tensors(2))
    mask = block_mask((places() == 0).cumsum(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        found = _plain_flex(query, key, value, block_mask=mask, enable_gqa=True)
    assert (found - by_a_mask(query, key, value)).abs().max() < 1e-13


def test_attention_costs_what_documents_look_at() -> None:
    inputs = [x.detach().float().requires_grad_() for x in tensors(4)]
    with FlopCounter() as counter:
        attend_in_documents(*inputs, found_documents(), False).sum().backward()
    pairs = sum(length**2 for row in ROWS for length in row)
    assert counter.total == 14 * 4 * 8 * pairs  # two products forward, five backward


def trained(batch: int, spec: ModelSpec = SPEC, **knobs: Value) -> tuple[list[float | None], dict[str, Tensor]]:
    """Losses and gradient norms of two passes over the documents, and the weights after them."""
    told: list[float | None] = []
    with session(batch, spec, **knobs) as made:
        for step in range(2):
            made.prepare(step)
            report = made.train_step()
            told += [report.loss, report.gradient_norm]
        return told, {name: value.clone() for name, value in made.full_parameters().items()}


@contextmanager
def session(
    batch: int, spec: ModelSpec = SPEC, lengths: tuple[int, ...] = LENGTHS, **knobs: Value
) -> Iterator[ParallelSession]:
    work = Workload(global_batch_size=batch, sequence_length=16, document_lengths=lengths)
    config = TrialConfig(precision="fp64").replace(knobs)
    made = NativeEngine().build(RankContext(rank=0, world_size=1, device=CPU), spec, config, work)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.prove(every=5)
@pytest.mark.parametrize("spec", [SPEC, LEARNED, ROUTED], ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "knobs", [{}, {"activation_checkpointing": "selective", "loss_chunk_size": 20, "zero_stage": 3}], ids=str
)
def test_packed_and_padded_passes_are_the_same_training(spec: ModelSpec, knobs: dict[str, Value]) -> None:
    """Four packed rows hold the documents of nine padded ones; micro-batches of both have other shares of the targets."""
    packed, weights = trained(4, spec, pack_sequences=True, micro_batch_size=2, **knobs)
    padded, others = trained(9, spec, micro_batch_size=3, **knobs)
    assert packed == pytest.approx(padded, abs=1e-12)
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) < 1e-12


def test_in_single_precision_they_differ_by_rounding() -> None:
    packed, _ = trained(4, pack_sequences=True, micro_batch_size=2, precision="fp32")
    padded, _ = trained(9, micro_batch_size=3, precision="fp32")
    assert packed == pytest.approx(padded, rel=2.0**-20)


def test_a_step_of_fewer_micro_batches_is_a_mean_over_its_own_targets() -> None:
    with session(4, pack_sequences=True) as made:
        made.prepare(0, micro_batches=2)
        batches = [dict(batch) for batch in made._batches]
        report = made.train_step()
    plain = build_transformer(SPEC, 16, 0, torch.float64)
    assert plain.head is not None
    plain.head.targets = float(sum((batch["labels"] >= 0).sum() for batch in batches)) / 2
    assert len(batches) == 2
    assert report.loss == pytest.approx(sum(plain(**batch).item() for batch in batches) / 2, abs=1e-12)


def test_no_document_sees_another_or_the_padding() -> None:
    model = build_transformer(SPEC, 16, 0, torch.float64)
    model.head = None
    tokens = torch.arange(32).view(2, 16) % 64
    changed = tokens.clone()
    changed[0, 3], changed[1, 12] = 60, 60
    one, other = (model(given, places=places()) for given in (tokens, changed))
    differ = (one - other).abs().amax(-1) > 0
    expected = torch.zeros(2, 16, dtype=torch.bool)
    expected[0, 3:9], expected[1, 12:] = True, True
    assert torch.equal(differ, expected)


def test_a_document_alone_in_its_row_is_a_whole_sample() -> None:
    model = build_transformer(SPEC, 16, 0, torch.float64)
    tokens = torch.arange(32).view(2, 16) % 64
    assert torch.equal(model(tokens, tokens, torch.arange(16).expand(2, 16)), model(tokens, tokens))


def test_samples_without_documents_are_trained_as_ever() -> None:
    with session(4, lengths=(), pack_sequences=True) as made:
        made.prepare(0)
        assert set(made._batches[0]) == {"tokens", "labels"}
        (module,) = (part.module for part in made.parts)
        assert isinstance(module, Transformer)
        assert module.head is not None
        assert module.head.targets == 0


def test_an_engine_that_does_not_pack_refuses_documents_however_they_got_there() -> None:
    work = Workload(global_batch_size=4, sequence_length=16, document_lengths=LENGTHS)
    context = RankContext(rank=0, world_size=1, device=CPU)
    with pytest.raises(
        EngineRefusalError, match="the plain engine trains on whole samples; leave document_lengths out"
    ) as told:
        refuse(Capability(engine="plain", knobs={}), context, SPEC, TrialConfig(), work)
    assert told.value.rule == "documents-engine"


def kept_bytes(documents: Documents | None) -> int:
    """What autograd keeps of attention over four heads of two rows, and of a product of its result."""
    sizes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return x

    # As projections give them: the heads of a token side by side.
    inputs = [x.detach().float().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors(4)]
    weight = torch.zeros(1, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        if documents is None:
            mixed = functional.scaled_dot_product_attention(*inputs, is_causal=True)
        else:
            mixed = attend_in_documents(*inputs, documents, False)
        held = functional.linear(mixed.transpose(1, 2).flatten(2), weight)
    assert held.requires_grad
    return sum(sizes.values()) - weight.nbytes


def test_results_are_kept_a_second_time_where_documents_are_put_together() -> None:
    """As is predicted: queries, keys, values, each document's own result, the rows of them, and the log-sum-exps."""
    row, sums = 2 * 16 * 4 * 8 * 4, 2 * 16 * 4 * 4
    assert kept_bytes(None) == 4 * row + sums
    assert kept_bytes(found_documents()) == 5 * row + sums
