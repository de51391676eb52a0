"""The kernel of attention that a configuration names is the one that runs."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from executor.engines.attention_kernel import BEST, choose_attention_kernel

FUSED = "ScaledDotProductFlashAttentionForCpuBackward0"


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    choose_attention_kernel(BEST)


def attention() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 16, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def kernel() -> str:
    return type(attention().grad_fn).__name__


def test_the_kernel_is_chosen_anew_by_each_session() -> None:
    chosen = {}
    for name in ("flash", "math", BEST):
        choose_attention_kernel(name)
        chosen[name] = kernel()
    assert chosen["flash"] == chosen[BEST] == FUSED
    assert chosen["math"] != FUSED


def test_every_kernel_computes_the_same() -> None:
    found = []
    for name in ("flash", "math"):
        choose_attention_kernel(name)
        found.append(attention())
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_a_kernel_that_the_device_has_not_is_never_replaced_in_silence() -> None:
    choose_attention_kernel("cudnn")
    with pytest.raises(RuntimeError, match="viable"):
        attention()
