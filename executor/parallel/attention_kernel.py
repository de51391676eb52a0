"""Which kernel computes scaled dot-product attention, in our modules and in a user's."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from search_spaces.attention_kernels import BEST, KERNELS, verdict

SWITCHES: Mapping[str, Callable[[bool], None]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
"""Value of `attention_backend` -> torch's switch of that kernel. They are the process's, and hold on CPUs too."""


PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_chosen = BEST


def choose_attention_kernel(name: str) -> None:
    """Leave torch this kernel alone, or the choice of all. Said anew by every session, as ranks outlive their trials."""
    # Remembered beside torch's switches, which torch.compile cannot read: it would leave the graph there.
    global _chosen
    _chosen = name
    for kernel, switch in SWITCHES.items():
        switch(name in (BEST, kernel))


def any_kernel() -> bool:
    """Whether the choice is torch's."""
    return _chosen == BEST


def scaled_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """torch's scaled dot-product attention of [batch, heads, tokens, width] to keys of as many heads or fewer, by the kernel
    that is chosen.

    Where that one takes no groups of heads (`verdict`), keys and values are repeated to one for each query head: torch would
    compute it by its `math` kernel, which keeps every score, or not at all.
    """
    grouped = query.shape[1] != key.shape[1]
    # A causal bias of torch's own is no mask: the kernels that take causal attention take it, too.
    if grouped and repeats_heads(query, key, masked=type(mask) is Tensor):
        key, value = (_one_for_each(x, query.shape[1]) for x in (key, value))
        grouped = False
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


def repeats_heads(query: Tensor, key: Tensor, masked: bool) -> bool:
    """Whether the chosen kernel takes no groups of heads on the query's device."""
    kind, precision = query.device.type, PRECISIONS.get(query.dtype)
    if kind not in KERNELS or precision is None:
        return False
    return verdict(_chosen, precision, query.shape[1], key.shape[1], kind, masked).repeats_heads


def _one_for_each(x: Tensor, heads: int) -> Tensor:
    """[batch, key-value heads, tokens, width] as [batch, heads, tokens, width], each head as often as query heads share it."""
    batch, groups, tokens, width = x.shape
    return x[:, :, None].expand(batch, groups, heads // groups, tokens, width).reshape(batch, heads, tokens, width)
