"""Attention inside packed documents on a GPU: results of flex attention, forward and backward, against a mask."""

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.proof import Item, Proof
from executor.parallel.attention import attend_in_documents, documents_in

BOUNDS = {torch.float32: 1e-2, torch.bfloat16: 3e-2}
"""Relative to the largest element. Products of float32 may be rounded to TF32, 10 bits."""
CASES = (((700, 200, 124), (512, 512)), ((1, 1000, 23), (1024,)), ((300, 300, 300, 124), (17, 1007)))
"""Tokens of the documents of each row."""
SMALL = (((40, 24), (64,)), ((1, 60, 3), (20, 20, 24)))
HEADS, KEYS, WIDTH = 8, 2, 64


def item() -> Item:
    """The item of the part by-hand."""
    return Item(name="flex attention: packed documents", show=prove_packing, seconds=60.0)


def prove_packing(proof: Proof) -> None:
    """Compare results and gradients of every case in both types."""
    device = proof.setting.device
    for rows in CASES if proof.setting.on_gpu else SMALL:
        for dtype, bound in BOUNDS.items():
            off = _off(rows, dtype, device)
            text = "; ".join(", ".join(map(str, row)) for row in rows)
            proof.claim(off <= bound, f"rows of {text} tokens, {dtype}: {off:.1e} off a mask in float32 (bound {bound:g})")


def _off(rows: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative difference of results and gradients."""
    length = sum(rows[0])
    positions = torch.stack([torch.cat([torch.arange(one) for one in row]) for row in rows]).to(device)
    shapes = ((len(rows), HEADS, length, WIDTH), *((len(rows), KEYS, length, WIDTH) for _ in range(2)))
    rounded = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], device=device).to(dtype)
    own = [x.clone().requires_grad_() for x in rounded]
    exact = [x.float().requires_grad_() for x in rounded]
    query, key, value = own
    found = attend_in_documents(query, key, value, documents_in(positions, dtype, WIDTH), grouped=True)
    expected = _by_a_mask(exact, positions)
    pairs = [
        (found, expected),
        *zip(torch.autograd.grad(found, own, weights), torch.autograd.grad(expected, exact, weights.float()), strict=True),
    ]
    return max(float((one.detach().float() - other.detach()).abs().max() / other.detach().abs().max()) for one, other in pairs)


def _by_a_mask(inputs: list[Tensor], positions: Tensor) -> Tensor:
    query, key, value = inputs
    numbers = (positions == 0).cumsum(1)
    seen = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
