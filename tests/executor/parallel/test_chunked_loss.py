"""The chunked loss: the numbers of the whole one, each product once, and no logits but a chunk's."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from executor.parallel.collectives import ProcessGroup
from executor.parallel.head import chunked_loss
from executor.parallel.model import Transformer, build_transformer, whole
from executor.parallel.tensor import TensorParallel
from search_spaces.models.model import ModelSpec

ALONE = TensorParallel(ProcessGroup(None, 1, 0), sequence_parallel=False)
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm}
CHUNKS = 4
TINY = ModelSpec(
    name="tied", family="llama", num_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=24, vocab_size=40, sequence_length=32, tied_embeddings=True,
)  # fmt: skip
"""Its weight is the output projection's and the embedding table, whose gradients are summed."""


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in PRODUCTS:
            self.shapes[tuple(result.shape)] += 1
        return result


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    rows, weight = torch.randn(30, 16, dtype=dtype), torch.randn(48, 16, dtype=dtype)
    return rows.requires_grad_(), weight.requires_grad_(), torch.randint(48, (30,))


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_those_of_the_whole_loss(padded: bool) -> None:
    rows, weight, targets = operands(torch.float64)
    if padded:
        targets[::5] = -100
    expected = functional.cross_entropy(rows @ weight.T, targets, reduction="sum") / 7
    wanted = torch.autograd.grad(3 * expected, (rows, weight))
    loss = chunked_loss(rows, weight, targets, 8, ALONE, 1 / 7, padded)
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close((rows.grad, weight.grad), wanted)
    assert weight.grad is not None and weight.grad.dtype == weight.dtype


def test_under_autocast_it_is_the_loss_of_the_narrow_operands() -> None:
    """As DistributedDataParallel trains in bf16: parameters stay fp32, and so do their gradients."""
    rows, weight, targets = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = functional.cross_entropy(functional.linear(rows, weight).float(), targets, reduction="sum") / 7
        wanted = torch.autograd.grad(expected, (rows, weight))
        loss = chunked_loss(rows, weight, targets, 8, ALONE, 1 / 7, False)
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-5)
    assert rows.grad is not None and weight.grad is not None
    for own, other in zip((rows.grad, weight.grad), wanted, strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, other, atol=0.02 * float(other.abs().max()), rtol=0)


def test_a_frozen_weight_has_no_product_of_its_own() -> None:
    rows, weight, targets = operands(torch.float32)
    with Products() as products:
        torch.autograd.backward(chunked_loss(rows, weight.detach(), targets, 8, ALONE, 1.0, False))
    assert products.shapes == {(8, 48): 3, (6, 48): 1, (8, 16): 3, (6, 16): 1}


@pytest.mark.parametrize("losses_wait, logits", [(False, 1), (True, 2)])
def test_logits_are_made_once_unless_many_losses_wait(losses_wait: bool, logits: int) -> None:
    model = built(TINY, losses_wait)
    tokens = torch.randint(TINY.vocab_size, (1, TINY.sequence_length))
    with Products() as products:
        model(tokens, tokens).backward()
    chunk = TINY.sequence_length // CHUNKS
    assert products.shapes[chunk, TINY.vocab_size] == logits * CHUNKS
    plain = build_transformer(TINY, TINY.sequence_length, seed=0, dtype=torch.float32)
    plain(tokens, tokens).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_without_gradients_the_loss_is_the_same() -> None:
    model = built(TINY, losses_wait=False)
    tokens = torch.randint(TINY.vocab_size, (1, TINY.sequence_length))
    with torch.no_grad(), Products() as products:
        loss = model(tokens, tokens)
    torch.testing.assert_close(loss, model(tokens, tokens))
    assert (TINY.vocab_size, TINY.hidden_size) not in products.shapes


def built(spec: ModelSpec, losses_wait: bool) -> Transformer:
    part = dataclasses.replace(whole(spec), losses_wait=losses_wait)
    return build_transformer(spec, spec.sequence_length, 0, torch.float32, spec.sequence_length // CHUNKS, part)
