"""Attention in blocks, and by flex attention, against every score under a mask; FLOPs by the closed form; exchanged heads."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor.measurement.flop_counter import FlopCounter
from executor.parallel import attention
from executor.parallel.attention import attend_by_blocks, attend_by_flex, attend_to_window, choose_attention_kernel, sees
from executor.parallel.collectives import ProcessGroup
from executor.parallel.context import Ulysses, _causal_mask, attend_local
from search_spaces.training.windows import AttentionWindow

CASES = [
    (40, AttentionWindow(6), 4, 0),
    (40, AttentionWindow(6, 3), 2, 0),
    (40, AttentionWindow(1, 1), 4, 0),
    (64, AttentionWindow(20, 9), 1, 0),
    (300, AttentionWindow(150), 4, 0),
    (300, AttentionWindow(130, 5), 2, 0),
    (40, AttentionWindow(6, 3), 2, 24),
    (600, AttentionWindow(129, 140), 2, 500),
    (40, AttentionWindow(8, chunked=True), 2, 0),
    (40, AttentionWindow(8, chunked=True), 4, 24),
    (40, AttentionWindow(12, chunked=True), 2, 0),
    (40, AttentionWindow(16, chunked=True), 4, 24),
]
"""Tokens, window, key-value heads, where queries begin."""


def tensors(length: int, heads: int, start: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, length - start, 8), (2, heads, length, 8), (2, heads, length, 8)]
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def by_a_mask(query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, start: int) -> Tensor:
    places = torch.arange(key.shape[2])
    seen = sees(window)(places[start:, None], places)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=key.shape[1] != query.shape[1])


@pytest.mark.parametrize("kernel", ["best", "math"])
@pytest.mark.parametrize(("length", "window", "heads", "start"), CASES)
def test_blocks_are_attention_under_a_mask(length: int, window: AttentionWindow, heads: int, start: int, kernel: str) -> None:
    choose_attention_kernel(kernel)
    try:
        inputs = tensors(length, heads, start)
        found = attend_by_blocks(*inputs, window, start)
        wanted = by_a_mask(*inputs, window, start)
        weights = torch.randn_like(wanted)
        gradients = [torch.autograd.grad((one * weights).sum(), inputs) for one in (found, wanted)]
    finally:
        choose_attention_kernel("best")
    assert (found - wanted).abs().max() < 1e-13
    assert max((one - other).abs().max() for one, other in zip(*gradients, strict=True)) < 1e-13


@pytest.mark.prove
@pytest.mark.parametrize(("length", "window", "heads", "start"), CASES[1::3])
def test_flex_attention_is_attention_under_a_mask(length: int, window: AttentionWindow, heads: int, start: int) -> None:
    """Forward: on CPUs it has no backward."""
    query, key, value = (x.detach() for x in tensors(length, heads, start))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        found = attend_by_flex(query, key, value, window, start, heads != 4, compiled=False)
    assert (found - by_a_mask(query, key, value, window, start)).abs().max() < 1e-13


def test_flex_attention_has_still_no_backward_on_CPUs() -> None:
    """Where torch gives it one, blocks of our own are for named kernels alone."""
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        attend_by_flex(*tensors(40, 4, 0), AttentionWindow(6), 0, False, compiled=False)


@pytest.mark.parametrize(
    "window",
    [AttentionWindow(16), AttentionWindow(16, 4), AttentionWindow(256), AttentionWindow(0), AttentionWindow(64, chunked=True)],
    ids=str,
)
def test_flops_are_those_of_the_pairs_that_are_visited(window: AttentionWindow) -> None:
    length = 512
    inputs = tensors(length, 4, 0, torch.float32)
    with FlopCounter() as counter:
        attend_local(*inputs, window, grouped=False).sum().backward()
    pairs = window.visited_pairs(length) if window.tokens else length**2
    samples, heads, width = 2, 4, 8
    assert counter.total == 14 * samples * heads * width * pairs  # two products forward, five backward


def test_a_window_keeps_less_than_every_score() -> None:
    """What backward needs of a window does not grow with the square of the sequence."""

    def kept(length: int, window: AttentionWindow) -> int:
        sizes: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            held = attend_local(*tensors(length, 4, 0, torch.float32), window, grouped=False)
        assert held.requires_grad
        return sum(sizes.values())

    assert kept(2048, AttentionWindow(64)) < 2.2 * kept(1024, AttentionWindow(64))


def test_whole_chunks_are_attention_under_a_mask_and_copy_nothing() -> None:
    for length, window, heads, start in CASES[-4:-2]:
        # As projections make them: the tokens of a sample are rows.
        inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(length, heads, start)]
        inputs = [x.requires_grad_() for x in inputs]
        found, wanted = attend_to_window(*inputs, window, start, heads != 4), by_a_mask(*inputs, window, start)
        weights = torch.randn_like(wanted)
        gradients = [torch.autograd.grad((one * weights).sum(), inputs) for one in (found, wanted)]
        assert (found - wanted).abs().max() < 1e-13
        assert max((one - other).abs().max() for one, other in zip(*gradients, strict=True)) < 1e-13
        assert found._base is not None and found.transpose(1, 2).is_contiguous()


def test_one_rank_exchanges_nothing() -> None:
    group = ProcessGroup(None, 1, 0)
    alone = Ulysses(group)
    query, key, value = tensors(40, 2, 0)
    assert torch.equal(
        alone.attend(query, key, value, AttentionWindow(0), True), attend_local(query, key, value, AttentionWindow(0), True)
    )
    assert group.sent == {}
    assert alone.positions(6).tolist() == [*range(6)]
    assert Ulysses(ProcessGroup(None, 3, 1)).positions(6).tolist() == [2, 3]


class OnCuda(Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    is_cuda = True


@pytest.mark.prove
def test_attention_of_a_device_takes_its_kernels_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The causal mask of the last tokens, a window, and documents, against a mask; flex attention forward, as CPUs have it."""
    query, key, value = (torch.randn(1, 2, 24, 16) for _ in range(3))
    asked: list[str] = []

    def plain() -> Callable[..., Tensor]:
        asked.append("flex")
        return attention._plain_flex

    monkeypatch.setattr(attention, "compiled_flex", plain)
    monkeypatch.setattr(attention, "compiled_flex", plain)
    last = query[:, :, 16:]
    bias, plain_mask = (_causal_mask(one, 24) for one in (last.as_subclass(OnCuda), last))
    found = functional.scaled_dot_product_attention(last, key, value, attn_mask=bias)
    wanted = functional.scaled_dot_product_attention(last, key, value, attn_mask=plain_mask)
    assert (found - wanted).abs().max() < 1e-5
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        window = attention.attend_to_window(query.as_subclass(OnCuda), key, value, AttentionWindow(6, 3), 0, False)
        places = torch.tensor([[*range(9), *range(15)]])
        documents = attention.documents_in(places.as_subclass(OnCuda), torch.float32, 16)
        assert documents.mask is not None
        in_documents = attention.attend_in_documents(query, key, value, documents, False)
    assert asked == ["flex", "flex"]
    assert (window - attention.attend_by_blocks(query, key, value, AttentionWindow(6, 3), 0)).abs().max() < 1e-5
    one_by_one = attention.attend_in_documents(query, key, value, attention.documents_in(places, torch.float32, 16), False)
    assert (in_documents - one_by_one).abs().max() < 1e-5
