"""Packs numbers as 8-bit integers and the largest magnitude of each block."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from search_spaces.optimizers import QUANTISED_BLOCK

CHUNK_ELEMENTS = 1 << 22
"""Elements that are quantised or dequantised at once: 16 MiB of fp32."""
LARGEST = 127
"""The largest code; the smallest is -127."""


def encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in int8 of [blocks, elements], and each block's largest magnitude [blocks, 1].

    A number that is not finite makes the magnitude, and so the whole block, not finite: an overflow is preserved.
    """
    largest = blocks.abs().amax(dim=1, keepdim=True)
    shares = blocks / torch.where(largest > 0, largest, 1.0)
    return shares.mul_(LARGEST).round_().to(torch.int8), largest


def pack(rows: Tensor) -> Tensor:
    """The bytes of each row of [rows, n]: n codes, then its blocks' magnitudes in fp32. The last block may be partial.

    Shape [rows, `integer_bytes(n)`]
    """
    return torch.cat([_pack(some) for some in row_chunks(rows)])


def unpack(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The rows [rows, columns] that the bytes represent, computed in at least fp32. Equal bytes give equal numbers."""
    count = len(packed)
    exact = torch.promote_types(dtype, torch.float32)
    # Copy, since the magnitudes may not be aligned to four bytes.
    largest = packed[:, columns:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    codes = functional.pad(packed[:, :columns].contiguous().view(torch.int8), (0, -columns % QUANTISED_BLOCK)).to(exact)
    whole = codes.view(count, -1, QUANTISED_BLOCK).mul_((largest / LARGEST).to(exact)[:, :, None])
    return whole.view(count, -1)[:, :columns].to(dtype)


def row_chunks(rows: Tensor) -> Sequence[Tensor]:
    """The rows in chunks of at most CHUNK_ELEMENTS, or one row, so that temporaries are small."""
    return torch.split(rows, max(CHUNK_ELEMENTS // max(rows.shape[1], 1), 1))


def _pack(rows: Tensor) -> Tensor:
    count, columns = rows.shape
    filled = functional.pad(rows.float(), (0, -columns % QUANTISED_BLOCK))
    codes, largest = encode(filled.reshape(-1, QUANTISED_BLOCK))
    unpadded = codes.view(count, -1)[:, :columns]
    return torch.cat((unpadded.view(torch.uint8), largest.view(count, -1).view(torch.uint8)), dim=1)
