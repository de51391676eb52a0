"""Numbers as their signs, eight to a byte, with the mean magnitude of each block of them."""

import torch
from torch import Tensor

from search_spaces.compression import SIGN_BLOCK

BITS = 8


def pack(rows: Tensor) -> Tensor:
    """The bytes of each row of [rows, n], n being whole blocks: n / 8 of signs, then each block's mean magnitude in fp32.

    Of all numbers of two values, one the other's opposite, these are nearest. Shape [rows, `sign_bytes(n)`]
    """
    return torch.cat([_pack(row) for row in torch.split(rows, 1)])


def unpack(packed: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
    """The rows [rows, elements] that bytes stand for. The same bytes give the same numbers anywhere."""
    count = len(packed)
    codes = packed[:, : elements // BITS]
    # A copy: scales need not begin where a number of four bytes may.
    scales = packed[:, elements // BITS :].clone(memory_format=torch.contiguous_format).view(torch.float32).to(dtype)
    bits = (codes[:, :, None] >> _places(packed.device)) & 1
    signs = bits.to(dtype).mul_(2).sub_(1)
    return signs.view(count, -1, SIGN_BLOCK).mul_(scales[:, :, None]).view(count, elements)


def _pack(rows: Tensor) -> Tensor:
    count = len(rows)
    blocks = rows.reshape(count, -1, SIGN_BLOCK)
    scales = blocks.abs().mean(dim=2).float()
    bits = (blocks >= 0).view(count, -1, BITS).to(torch.uint8)
    packed = (bits << _places(rows.device)).sum(dim=2, dtype=torch.uint8)
    return torch.cat((packed, scales.view(torch.uint8)), dim=1)


def _places(device: torch.device) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=device)
