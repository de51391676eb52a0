"""Frozen matrices in 8 or 4 bits, dequantised for each product [Dettmers et al. 2023, QLoRA], in plain torch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from executor.parallel.block_integers import LARGEST, encode
from executor.parallel.initialization import CHUNK_ELEMENTS, Drawn, FirstValues
from search_spaces.training.adapters import QUANTISED_BLOCK

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the 16 four-bit codes, relative to their block's largest magnitude; equally likely for normal weights [QLoRA,
appendix E]."""
SCALE_BYTES = 4
"""Bytes of a block's largest magnitude, in fp32."""


class QuantisedMatrix(nn.Module):
    """A frozen matrix [outputs, inputs] in `bits` (8 or 4), dequantised for each product in the dtype of its operand.

    1. Rows are cut into blocks of 64, the last one padded with zeros. A block has its largest magnitude and a code per element.
    2. Rows are along the dimension that tensor ranks do not divide, inputs or (`transposed`) outputs: no tensor-parallel size
       cuts a block, so that all layouts compute with the same values.
    3. All of this is stored as the bytes of one parameter, magnitudes first, so that stage 3 shards it like others.
    4. Backward dequantises the matrix again; only the bytes are saved for it.
    """

    values: Tensor

    def __init__(self, weight: Tensor, bits: int, transposed: bool) -> None:
        super().__init__()
        rows = weight.detach().T if transposed else weight.detach()
        self.bits, self.transposed, (self.rows, self.length) = bits, transposed, rows.shape
        self.packed = nn.Parameter(quantise(rows, bits), requires_grad=False)
        self.register_buffer("values", pairs_of_codes(weight) if bits == 4 else None, persistent=False)

    def make_tables(self, dtype: torch.dtype) -> None:
        """Create the table of the codes' values on the CPU; the constructor created it on the matrix's (meta) device."""
        if self.bits == 4:
            self.values = pairs_of_codes(torch.empty(0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[…, inputs] to [..., outputs]."""
        return _Product.apply(x, self.packed, self.values, self.rows, self.length, self.transposed)  # type: ignore[no-untyped-call,no-any-return]


class QuantisedValues(FirstValues):
    """The bytes of a quantised matrix, of which only some rows are drawn at a time.

    A block's magnitude and its codes are stored apart, so a rank that keeps both draws the block twice.
    """

    def __init__(self, matrix: Drawn, quantised: QuantisedMatrix) -> None:
        """`matrix`: the initial values of the matrix that `quantised` represents."""
        self._matrix, self._bits, self._transposed = matrix, quantised.bits, quantised.transposed
        self._rows, self._length = quantised.rows, quantised.length
        self._blocks = -(-self._length // QUANTISED_BLOCK)
        """Blocks in a row."""
        self.elements = quantised.packed.numel()

    @torch.no_grad()
    def fill(self, out: Tensor, start: int = 0) -> None:
        if is_fake(out) or out.device.type == "meta":
            return
        flat, scales = out.view(-1), self._blocks * SCALE_BYTES
        edge = self._rows * scales
        middle = min(max(edge - start, 0), flat.numel())
        self._fill(flat[:middle], start, scales, slice(None, edge))
        self._fill(flat[middle:], start + middle - edge, self._blocks * QUANTISED_BLOCK * self._bits // 8, slice(edge, None))

    def _fill(self, out: Tensor, start: int, row_bytes: int, kind: slice) -> None:
        """Fill in the bytes of one kind, `row_bytes` per row, from `start` on; `kind`: their slice in the whole matrix."""
        most, done = max(CHUNK_ELEMENTS // self._length, 1), 0
        while done < out.numel():
            row, skip = divmod(start + done, row_bytes)
            rows = min(most, -(-(skip + out.numel() - done) // row_bytes))
            edges = (None if edge is None else edge // self._rows * rows for edge in (kind.start, kind.stop))
            part = self._packed(row, rows, out.device)[slice(*edges)][skip : skip + out.numel() - done]
            out[done : done + part.numel()].copy_(part)
            done += part.numel()

    def _packed(self, first: int, rows: int, device: torch.device) -> Tensor:
        """The bytes of some rows, as a separate matrix."""
        drawn = torch.empty(rows * self._length, dtype=self._matrix.dtype, device=device)
        row = 1 if self._transposed else self._length
        self._matrix.sliced(first * row, rows * row).fill(drawn)
        return quantise(drawn.view(self._length, rows).T if self._transposed else drawn.view(rows, self._length), self._bits)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, values: Tensor | None, rows: int, length: int, transposed: bool) -> Tensor:
        ctx.save_for_backward(packed, values)
        ctx.rows, ctx.length, ctx.transposed = rows, length, transposed
        stored = dequantise(packed, values, rows, length, x.dtype)
        return x @ (stored if transposed else stored.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        packed, values = ctx.saved_tensors
        stored = dequantise(packed, values, ctx.rows, ctx.length, gradients[0].dtype)
        return gradients[0] @ (stored.T if ctx.transposed else stored), None, None, None, None, None


@torch.no_grad()
def quantise(matrix: Tensor, bits: int) -> Tensor:
    """The bytes of [rows, length]: each block's largest magnitude, then the codes; two four-bit codes per byte."""
    filled = nn.functional.pad(matrix.float().contiguous(), (0, -matrix.shape[1] % QUANTISED_BLOCK)).view(-1, QUANTISED_BLOCK)
    if bits == 8:
        integers, largest = encode(filled)
        codes = integers.view(torch.uint8)
    else:
        largest = filled.abs().amax(dim=1, keepdim=True)
        levels = torch.tensor(NF4, device=matrix.device)
        shares = filled / torch.where(largest > 0, largest, 1.0)
        nearest = torch.bucketize(shares, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        codes = nearest[:, 0::2] * 16 + nearest[:, 1::2]
    return torch.cat((largest.view(torch.uint8).flatten(), codes.flatten()))


def dequantise(packed: Tensor, values: Tensor | None, rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """The matrix [rows, length] that the bytes represent; `values`: the values of a byte of two codes."""
    blocks = rows * -(-length // QUANTISED_BLOCK)
    largest = packed[: blocks * SCALE_BYTES].view(torch.float32)
    codes = packed[blocks * SCALE_BYTES :]
    if values is None:
        whole, unit = codes.view(torch.int8).to(dtype), largest / LARGEST
    else:
        whole, unit = nn.functional.embedding(codes.int(), values.to(dtype)), largest
    scaled = whole.view(blocks, QUANTISED_BLOCK).mul_(unit.to(dtype)[:, None])
    return scaled.view(rows, -1)[:, :length]


def pairs_of_codes(like: Tensor) -> Tensor:
    """[256, 2]: the values of each byte of two codes."""
    levels = torch.tensor(NF4, dtype=like.dtype, device=like.device)
    return torch.cartesian_prod(levels, levels)
