"""Selects the kernel of scaled dot-product attention, in our modules and in a user's."""

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
"""Value of `attention_backend` -> torch's switch of that kernel. The switches are process-wide and also apply on CPUs."""


PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_chosen = BEST


def choose_attention_kernel(name: str) -> None:
    """Allow torch only this kernel, or all of them. Every session calls this, since ranks outlive their trials."""
    # Stored in addition to torch's switches, because reading those causes a graph break in torch.compile.
    global _chosen
    _chosen = name
    for kernel, switch in SWITCHES.items():
        switch(name in (BEST, kernel))


def any_kernel() -> bool:
    """Whether torch chooses the kernel."""
    return _chosen == BEST


def scaled_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """torch's scaled dot-product attention of [batch, heads, tokens, width] to keys of as many heads or fewer, with the chosen
    kernel.

    If the kernel does not support grouped heads (`verdict`), keys and values are repeated for each query head: otherwise torch
    would use its `math` kernel, which stores every score, or raise an error. Values that are narrower than keys are padded for
    the same reason.
    """
    width = value.shape[-1]
    if width < query.shape[-1]:
        padded = functional.pad(value, (0, query.shape[-1] - width))
        return scaled_attention(query, key, padded, mask, is_causal)[..., :width]
    grouped = query.shape[1] != key.shape[1]
    # torch's causal bias is not a mask: the kernels that support causal attention support it too.
    if grouped and repeats_heads(query, key, masked=type(mask) is Tensor):
        key, value = (_one_for_each(x, query.shape[1]) for x in (key, value))
        grouped = False
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


def repeats_heads(query: Tensor, key: Tensor, masked: bool) -> bool:
    """Whether the chosen kernel does not support grouped heads on the query's device."""
    kind, precision = query.device.type, PRECISIONS.get(query.dtype)
    if kind not in KERNELS or precision is None:
        return False
    return verdict(_chosen, precision, query.shape[1], key.shape[1], kind, masked).repeats_heads


def _one_for_each(x: Tensor, heads: int) -> Tensor:
    """[batch, key-value heads, tokens, width] to [batch, heads, tokens, width]: repeat heads for queries that share them."""
    batch, groups, tokens, width = x.shape
    return x[:, :, None].expand(batch, groups, heads // groups, tokens, width).reshape(batch, heads, tokens, width)
