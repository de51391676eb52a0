"""Numbers as integers of 8 bits, with the largest magnitude of each block of them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from search_spaces.optimizers import QUANTISED_BLOCK

CHUNK_ELEMENTS = 1 << 22
"""Elements that are made integers, or made of them, at once: 16 MiB of fp32."""
LARGEST = 127
"""The largest code; the smallest is its opposite."""


def encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in int8 of [blocks, elements], and each block's largest magnitude [blocks, 1].

    What is not finite makes the magnitude so, and with it all that the block stands for: an overflow stays one.
    """
    largest = blocks.abs().amax(dim=1, keepdim=True)
    shares = blocks / torch.where(largest > 0, largest, 1.0)
    return shares.mul_(LARGEST).round_().to(torch.int8), largest


def pack(rows: Tensor) -> Tensor:
    """The bytes of each row of [rows, n]: n codes, then its blocks' magnitudes in fp32. A last block may be a part of one.

    Shape [rows, `integer_bytes(n)`]
    """
    return torch.cat([_pack(some) for some in few(rows)])


def unpack(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The rows [rows, columns] that bytes stand for, computed in fp32 at least: the same bytes are the same numbers."""
    count = len(packed)
    exact = torch.promote_types(dtype, torch.float32)
    # Copies: magnitudes need not begin where a number of four bytes may.
    largest = packed[:, columns:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    codes = functional.pad(packed[:, :columns].contiguous().view(torch.int8), (0, -columns % QUANTISED_BLOCK)).to(exact)
    whole = codes.view(count, -1, QUANTISED_BLOCK).mul_((largest / LARGEST).to(exact)[:, :, None])
    return whole.view(count, -1)[:, :columns].to(dtype)


def few(rows: Tensor) -> Sequence[Tensor]:
    """Some rows after the others, so that what comes in between of each is small: at most CHUNK_ELEMENTS, or one row."""
    return torch.split(rows, max(CHUNK_ELEMENTS // max(rows.shape[1], 1), 1))


def _pack(rows: Tensor) -> Tensor:
    count, columns = rows.shape
    filled = functional.pad(rows.float(), (0, -columns % QUANTISED_BLOCK))
    codes, largest = encode(filled.reshape(-1, QUANTISED_BLOCK))
    kept = codes.view(count, -1)[:, :columns]
    return torch.cat((kept.view(torch.uint8), largest.view(count, -1).view(torch.uint8)), dim=1)
