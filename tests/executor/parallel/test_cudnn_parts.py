"""Attention of a context rank by cuDNN's kernel: two calls without a mask, merged. The operators are stand-ins on the CPU with
the documented results: the logarithm of the sum of exponentials is [batch, heads, tokens, 1] in fp32 (torch 2.11 and 2.13)."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executor.parallel import attention, context
from executor.parallel.attention import BEST, attend_to_earlier, choose_attention_kernel
from search_spaces.training.windows import AttentionWindow

NAME = "_scaled_dot_product_cudnn_attention"
QUERY_HEADS, TOKENS, EARLIER, WIDTH = 4, 6, 10, 8


def scores(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    product = query.double() @ key.double().transpose(-1, -2) / math.sqrt(query.shape[-1])
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    return product.masked_fill(later, -math.inf) if is_causal else product


def summed_over_groups(gradient: Tensor, heads: int) -> Tensor:
    return gradient.unflatten(1, (heads, -1)).sum(dim=2)


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, compute_log_sumexp: bool, dropout: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert bias is None and compute_log_sumexp
    product = scores(query, key, is_causal)
    weights = product.softmax(dim=-1) @ value.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logarithm = product.logsumexp(dim=-1, keepdim=True)
    logarithm = logarithm if query.dtype == torch.float64 else logarithm.float()
    seed = torch.zeros((), dtype=torch.long)
    empty = torch.empty(0)
    return weights.to(query.dtype), logarithm, empty, empty, query.shape[2], key.shape[2], seed, seed.clone(), empty


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logarithm: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, cumulated_queries: Tensor | None, cumulated_keys: Tensor | None, most_queries: int, most_keys: int,
    dropout: float, is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Dao et al. 2022, algorithm 4: weights from the logarithm, and the product of gradient and result."""
    assert (most_queries, most_keys, dropout) == (query.shape[2], key.shape[2], 0.0)
    groups, double = query.shape[1] // key.shape[1], gradient.double()
    weights = (scores(query, key, is_causal) - logarithm).exp()
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    delta = (double * out.double()).sum(dim=-1, keepdim=True)
    of_scores = weights * (double @ values.transpose(-1, -2) - delta) / math.sqrt(query.shape[-1])
    of_keys, of_values = (
        summed_over_groups(x, key.shape[1])
        for x in (of_scores.transpose(-1, -2) @ query.double(), weights.transpose(-1, -2) @ double)
    )
    return (of_scores @ keys).to(query.dtype), of_keys.to(key.dtype), of_values.to(value.dtype)


@pytest.fixture(autouse=True)
def chosen() -> Iterator[None]:
    choose_attention_kernel("cudnn")
    yield
    choose_attention_kernel(BEST)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl(NAME, forward, "CPU")
    library.impl(f"{NAME}_backward", backward, "CPU")
    yield
    library._destroy()


def operands(dtype: torch.dtype, kv_heads: int = 2, value_width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((QUERY_HEADS, TOKENS, WIDTH), (kv_heads, EARLIER + TOKENS, WIDTH), (kv_heads, EARLIER + TOKENS, value_width))
    return [torch.randn(2, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def by_a_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    choose_attention_kernel(BEST)
    return context._attend_from(EARLIER, query, key, value, AttentionWindow(0), True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("kv_heads", "value_width"), [(4, WIDTH), (2, WIDTH), (1, WIDTH // 2)])
def test_parts_are_merged_to_what_a_mask_gives(
    dtype: torch.dtype, tolerance: float, kv_heads: int, value_width: int, on_cpu: None
) -> None:
    mine, others = (operands(dtype, kv_heads, value_width) for _ in range(2))
    mixed, expected = attend_to_earlier(*mine), by_a_mask(*others)
    gradient = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    mixed.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(mixed, expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.filterwarnings("default")  # of what the compiler does inside it warns itself
def test_a_compiled_block_has_one_graph(on_cpu: None) -> None:
    mine, others = operands(torch.bfloat16), operands(torch.bfloat16)
    mixed = torch.compile(attend_to_earlier, backend="aot_eager", fullgraph=True)(*mine)
    expected = attend_to_earlier(*others)
    for result in (mixed, expected):
        result.float().square().sum().backward()
    torch.testing.assert_close(mixed, expected)
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Recorded(TorchDispatchMode):
    """Names of operators, with the sizes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self.calls.append((function.overloadpacket.__name__, sizes))
        return result


@pytest.mark.parametrize(("start", "virtual", "count"), [(0, 0, 0), (16 * EARLIER, 0, 2), (0, 16 * EARLIER, 2)])
def test_a_device_calls_the_kernel_without_a_mask(
    start: int, virtual: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors without data: the operators, and that nothing of the size of queries times keys is created."""
    monkeypatch.setattr(context, "has_no_bias", lambda query: True)
    monkeypatch.setattr(context, "scaled_attention", lambda query, key, value, is_causal: query)
    query, key = (torch.empty(1, 2, tokens, 16, dtype=torch.bfloat16, device="meta") for tokens in (256, 4096))
    with Recorded() as recorded:
        mixed = context._attend_from(start, query, key, key, AttentionWindow(0), False, virtual)
    assert mixed.shape == query.shape
    assert [name for name, _ in recorded.calls].count(NAME) == count
    # Without earlier keys the kernel's own causal attention serves, whose bias has a size but no data.
    largest = max((size for _, sizes in recorded.calls for size in sizes), default=0)
    assert count == 0 or query.numel() <= largest < (start + virtual) * 256


def test_only_the_kernel_that_lacks_the_bias_is_called_in_parts() -> None:
    on_cuda = cast("Tensor", SimpleNamespace(is_cuda=True))
    needed = {}
    for name in ("flash", "efficient", "cudnn", "math", BEST):
        choose_attention_kernel(name)
        needed[name] = (attention.has_no_bias(on_cuda), attention.has_no_bias(torch.empty(1)))
    assert needed == {name: (name == "cudnn", False) for name in needed}


def lower_right(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False, debug_mask: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The documented flash operator: with keys before the queries, causal means that the last query sees the last key."""
    assert is_causal and query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    keys, values = (x.double().repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1 + key.shape[2] - query.shape[2])
    product = (query.double() @ keys.transpose(-1, -2) * scale).masked_fill(later, -math.inf)
    empty = torch.empty(0)
    mixed = (product.softmax(dim=-1) @ values).to(query.dtype)
    return mixed, product.logsumexp(dim=-1).float(), empty, empty, query.shape[2], key.shape[2], empty, empty, empty


@pytest.mark.filterwarnings("default")  # of what the compiler does inside it warns itself
@pytest.mark.parametrize(("width", "value_width"), [(8, 8), (12, 12), (16, 8)])
def test_a_compiled_block_calls_flash_by_name(width: int, value_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((4, TOKENS, width), (2, EARLIER + TOKENS, width), (2, EARLIER + TOKENS, value_width))
    query, key, value = (torch.randn(2, *shape).bfloat16() for shape in shapes)
    expected = by_a_mask(query, key, value)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", lower_right, "CPU")
    monkeypatch.setattr(context, "needs_flash", lambda query: True)
    mixed = torch.compile(
        lambda *operands: context._attend_from(EARLIER, *operands, AttentionWindow(0), True), backend="eager", fullgraph=True
    )(query, key, value)
    library._destroy()
    torch.testing.assert_close(mixed, expected, rtol=2e-2, atol=2e-2)


def test_flash_is_called_by_name_in_compiled_blocks_on_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(is_cuda: bool = True, dtype: torch.dtype = torch.bfloat16, width: int = 64, major: int = 8) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
        query = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(width,), device="cuda")
        return attention.needs_flash(cast("Tensor", query))

    choose_attention_kernel(BEST)
    assert not needed()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert (
        needed()
        and not needed(dtype=torch.float32)
        and not needed(width=264)
        and not needed(is_cuda=False)
        and not needed(major=7)
    )
    choose_attention_kernel("math")
    assert not needed()
