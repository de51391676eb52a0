"""Attention to a window, and with limited scores, on a GPU: flex attention, forward and backward, against masked scores."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.proof import Item, Proof
from executor.parallel.attention import Scores, attend_by_scores, attend_to_window, attend_with_scores, sees
from search_spaces.training.windows import AttentionWindow

BOUNDS = {torch.float32: 1e-2, torch.bfloat16: 3e-2}
"""Relative to the largest element. Products of float32 may be rounded to TF32, 10 bits."""
CASES = (
    (1024, AttentionWindow(256), 0),
    (1024, AttentionWindow(200, 16), 0),
    (1024, AttentionWindow(256, 4), 512),
    (1000, AttentionWindow(300), 0),
)
"""Tokens, window, position of the first query."""
SMALL = ((64, AttentionWindow(16), 0), (64, AttentionWindow(12, 3), 32))
LIMITED = Scores(softcap=1.0, sinks=torch.linspace(-1.0, 2.0, 8))
HEADS, KEYS, WIDTH = 8, 2, 64


def item() -> Item:
    """The item of the part by-hand."""
    return Item(name="flex attention: windows", show=prove_windows, seconds=60.0)


def prove_windows(proof: Proof) -> None:
    """Compare results and gradients of every case in both types, with the scores as they are and limited."""
    device = proof.setting.device
    for length, window, start in CASES if proof.setting.on_gpu else SMALL:
        for dtype, bound in BOUNDS.items():
            for scores in (None, LIMITED):
                off = _off(length, window, start, dtype, device, scores)
                text = f"{window.tokens} of {length} tokens and {window.global_tokens} global ones, queries from {start} on"
                text += f", scores limited to {scores.softcap:g}, with sinks" if scores else ""
                proof.claim(off <= bound, f"{text}, {dtype}: {off:.1e} off a mask in float32 (bound {bound:g})")


def _off(
    length: int, window: AttentionWindow, start: int, dtype: torch.dtype, device: torch.device, scores: Scores | None
) -> float:
    """The largest relative difference of results and gradients."""
    shapes = ((1, HEADS, length - start, WIDTH), (1, KEYS, length, WIDTH), (1, KEYS, length, WIDTH))
    if scores is not None and scores.sinks is not None:
        scores = Scores(scores.softcap, scores.sinks.to(device))
    rounded = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], device=device).to(dtype)
    own = [x.clone().requires_grad_() for x in rounded]
    exact = [x.float().requires_grad_() for x in rounded]
    query, key, value = own
    if scores is None:
        found = attend_to_window(query, key, value, window, start, grouped=True)
    else:
        found = attend_with_scores(query, key, value, scores, window, start)
    expected = _by_a_mask(exact, window, start, scores)
    pairs = [
        (found, expected),
        *zip(torch.autograd.grad(found, own, weights), torch.autograd.grad(expected, exact, weights.float()), strict=True),
    ]
    return max(float((one.detach().float() - other.detach()).abs().max() / other.detach().abs().max()) for one, other in pairs)


def _by_a_mask(inputs: Sequence[Tensor], window: AttentionWindow, start: int, scores: Scores | None) -> Tensor:
    query, key, value = inputs
    positions = torch.arange(key.shape[2], device=query.device)
    seen = sees(window)(positions[start:, None], positions)
    if scores is not None:
        return attend_by_scores(query, key, value, scores, seen)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
