"""The kernel of attention that a configuration names is the one that runs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from executor.parallel import attention as attention_module
from executor.parallel import context
from executor.parallel.attention import BEST, any_kernel, choose_attention_kernel, repeats_heads, scaled_attention
from search_spaces.kernels import KernelVerdict, verdict

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


def test_a_causal_bias_is_made_while_flops_are_counted() -> None:
    """As context parallelism makes it on CUDA; torch cannot create one under a dispatch mode."""
    query, key, value = torch.randn(3, 1, 2, 8, 4).unbind()
    query = query[:, :, 4:]
    on_cuda = cast("Tensor", SimpleNamespace(is_cuda=True, shape=query.shape))
    with FlopCounterMode(display=False):
        bias = context._causal_mask(on_cuda, 8)
        found = scaled_attention(query, key, value, bias)
    expected = scaled_attention(query, key, value, context._causal_mask(query, 8))
    assert type(bias) is not Tensor
    torch.testing.assert_close(found, expected)


REPEATED = KernelVerdict(repeats_heads=True)
CASES: tuple[tuple[str, str, str, bool, KernelVerdict], ...] = (
    ("best", "fp32", "cuda", False, REPEATED),  # else math: flash and cudnn do not compute in fp32
    ("best", "bf16", "cuda", False, KernelVerdict()),
    ("best", "bf16", "cuda", True, REPEATED),
    ("best", "fp64", "cuda", False, KernelVerdict()),  # math is all there is
    ("best", "fp32", "cpu", False, KernelVerdict()),
    ("efficient", "bf16", "cuda", False, REPEATED),
    ("efficient", "fp32", "cuda", True, REPEATED),
    ("efficient", "fp64", "cuda", False, KernelVerdict("the efficient kernel supports only fp32, bf16, fp16, not fp64")),
    ("flash", "bf16", "cuda", False, KernelVerdict()),
    ("flash", "bf16", "cuda", True, KernelVerdict("the flash kernel does not accept a mask")),
    ("flash", "fp32", "cpu", True, KernelVerdict()),
    ("cudnn", "fp16", "cuda", True, KernelVerdict()),
    ("math", "fp32", "cuda", True, KernelVerdict()),
    ("cudnn", "bf16", "cpu", False, KernelVerdict("the cudnn kernel runs only on CUDA")),
)  # fmt: skip


@pytest.mark.parametrize(("kernel", "precision", "device", "masked", "expected"), CASES)
def test_grouped_queries_run_on_the_kernel_that_is_named(
    kernel: str, precision: str, device: str, masked: bool, expected: KernelVerdict
) -> None:
    assert verdict(kernel, precision, 8, 2, device, masked) == expected
    assert not verdict(kernel, precision, 8, 8, device, masked).repeats_heads


def test_the_engine_asks_for_its_device_and_type() -> None:
    def on(device: str, dtype: torch.dtype) -> bool:
        query, key = (SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, shape=(1, n, 4, 8)) for n in (8, 2))
        return repeats_heads(cast(Any, query), cast(Any, key), masked=False)

    assert [on("cuda", torch.float32), on("cuda", torch.bfloat16), on("cpu", torch.float32)] == [True, False, False]
    choose_attention_kernel("efficient")
    assert on("cuda", torch.bfloat16)


def test_repeated_heads_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 16, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    asked: list[bool] = []

    def run(repeats: bool) -> list[Tensor]:
        monkeypatch.setattr(attention_module, "repeats_heads", lambda *_, **__: asked.append(repeats) or repeats)
        mixed = scaled_attention(query, key, value, is_causal=True)
        return [mixed, *torch.autograd.grad(mixed.square().sum(), (query, key, value))]

    for repeated, shared in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(repeated, shared, rtol=1e-12, atol=1e-12)
    assert asked == [True, False]


@pytest.mark.prove
def test_compiled_blocks_know_the_choice_without_leaving_the_graph() -> None:
    def told(x: Tensor) -> Tensor:
        return x + 1 if any_kernel() else x - 1

    compiled = torch.compile(told, fullgraph=True, backend="eager")
    found = []
    for name in (BEST, "math"):
        choose_attention_kernel(name)
        found.append(float(compiled(torch.zeros(()))))
    assert found == [1, -1]
