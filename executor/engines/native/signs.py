"""Packs numbers as their signs, eight per byte, and the mean magnitude of each block."""

import torch
from torch import Tensor

from search_spaces.compression import SIGN_BLOCK

BITS = 8


def pack(rows: Tensor) -> Tensor:
    """The bytes of each row of [rows, n] (n: whole blocks): n / 8 bytes of signs, then each block's mean magnitude in fp32.

    The mean magnitude is the best approximation by signs times one number. Shape [rows, `sign_bytes(n)`].
    """
    return torch.cat([_pack(row) for row in torch.split(rows, 1)])


def unpack(packed: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
    """The rows [rows, elements] that the bytes represent. Equal bytes give equal numbers on every rank."""
    count = len(packed)
    codes = packed[:, : elements // BITS]
    # Copy, since the scales may not be aligned to four bytes.
    scales = packed[:, elements // BITS :].clone(memory_format=torch.contiguous_format).view(torch.float32).to(dtype)
    bits = (codes[:, :, None] >> _bit_positions(packed.device)) & 1
    signs = bits.to(dtype).mul_(2).sub_(1)
    return signs.view(count, -1, SIGN_BLOCK).mul_(scales[:, :, None]).view(count, elements)


def _pack(rows: Tensor) -> Tensor:
    count = len(rows)
    blocks = rows.reshape(count, -1, SIGN_BLOCK)
    scales = blocks.abs().mean(dim=2).float()
    bits = (blocks >= 0).view(count, -1, BITS).to(torch.uint8)
    packed = (bits << _bit_positions(rows.device)).sum(dim=2, dtype=torch.uint8)
    return torch.cat((packed, scales.view(torch.uint8)), dim=1)


def _bit_positions(device: torch.device) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=device)
