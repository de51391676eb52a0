"""Attention whose scores are limited: against the formula, by blocks of a sequence, and as flex attention computes it."""

import functools

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from executor.parallel.attention import Scores, attend_by_scores, attend_with_scores, block_mask_of, by_flex, sees, soft_cap
from executor.parallel.collectives import ProcessGroup
from executor.parallel.head import chunked_loss
from executor.parallel.tensor import TensorParallel, vocabulary_cross_entropy
from search_spaces.training.windows import AttentionWindow

TOKENS, WIDTH = 24, 16
LIMITED, SINKS = Scores(softcap=1.5), Scores(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64))
BOTH = Scores(softcap=1.5, sinks=SINKS.sinks)
KINDS = pytest.mark.parametrize("scores", [LIMITED, SINKS, BOTH], ids=["limited", "sinks", "both"])
WINDOWS = [AttentionWindow(0), AttentionWindow(7), AttentionWindow(5, 3)]


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of two."""
    return tuple(torch.randn(2, heads, TOKENS, WIDTH, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))  # type: ignore[return-value]


def by_formula(query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, scores: Scores) -> Tensor:
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    products = query @ key.transpose(-1, -2) / WIDTH**0.5
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    places = torch.arange(TOKENS)
    seen = sees(window)(places[:, None], places[None])
    shares = products.masked_fill(~seen, float("-inf")).exp()
    sinks = 0.0 if scores.sinks is None else scores.sinks.to(query.dtype).exp()[:, None, None]
    return shares / (shares.sum(-1, keepdim=True) + sinks) @ value


@KINDS
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_scores_are_changed_before_the_softmax(window: AttentionWindow, scores: Scores) -> None:
    query, key, value = drawn()
    expected, result = by_formula(query, key, value, window, scores), attend_with_scores(query, key, value, scores, window)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(result)
    wanted = torch.autograd.grad(expected, (query, key, value), gradient)
    for one, other in zip(torch.autograd.grad(result, (query, key, value), gradient), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_later_queries_see_what_they_see_in_the_whole(window: AttentionWindow) -> None:
    query, key, value = drawn()
    whole = attend_with_scores(query, key, value, LIMITED, window)
    part = attend_with_scores(query[:, :, 8:16], key[:, :, :16], value[:, :, :16], LIMITED, window, start=8)
    torch.testing.assert_close(part, whole[:, :, 8:16], rtol=1e-12, atol=1e-12)


def test_a_rank_with_some_heads_has_their_sinks() -> None:
    query, key, value = drawn()
    whole = attend_with_scores(query, key, value, BOTH, AttentionWindow(0))
    half = attend_with_scores(query[:, 2:], key[:, 1:], value[:, 1:], BOTH.of_heads(2, 2), AttentionWindow(0))
    torch.testing.assert_close(half, whole[:, 2:])


def test_virtual_keys_are_seen_by_all() -> None:
    query, key, value = drawn()
    result = attend_with_scores(query[:, :, 2:], key, value, LIMITED, AttentionWindow(4), virtual=2)
    places = torch.arange(TOKENS - 2)
    seen = torch.cat(
        (torch.ones(TOKENS - 2, 2, dtype=torch.bool), sees(AttentionWindow(4))(places[:, None], places[None])), dim=1
    )
    torch.testing.assert_close(result, attend_by_scores(query[:, :, 2:], key, value, LIMITED, seen))


@pytest.mark.prove(every=6)
@KINDS
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_changes_scores_alike(window: AttentionWindow, scores: Scores) -> None:
    with torch.no_grad():
        query, key, value = (x.detach() for x in drawn(torch.float32))
        mask = block_mask_of(window, 0, TOKENS, TOKENS, "cpu")
        result = by_flex(query, key, value, scores, mask, flex_attention)
        torch.testing.assert_close(
            result, by_formula(query, key, value, window, scores), rtol=1e-5, atol=1e-5, check_dtype=False
        )


def test_a_chunked_loss_of_limited_logits_has_their_gradients() -> None:
    single = TensorParallel(ProcessGroup(None, 1, 0), sequence_parallel=False)
    rows = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 8, 1, 5, 5, 2, 7, 4, 6])
    plain = functools.partial(vocabulary_cross_entropy, targets=targets, tensor=single, padded=False)
    expected = plain(soft_cap(rows @ weight.T, 2.0)) / 10
    loss = chunked_loss(rows, weight, targets, 4, single, 0.1, padded=False, softcap=2.0)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected, (rows, weight))
    for one, other in zip(torch.autograd.grad(loss, (rows, weight)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
