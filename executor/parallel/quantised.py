"""Matrix products in few bits, in plain torch: blocks of 8-bit integers, frozen matrices in 8 or 4 bits [Dettmers et al. 2023,
QLoRA], and float8 products that equal those of torchao's recipes.

torchao itself is not used: its conversion replaces our layers by its own, which do not support slices and the collectives
between ranks, and the engine must run where only torch can be installed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

from executor.parallel.initialization import CHUNK_ELEMENTS, Drawn, FirstValues
from search_spaces.knobs.computation import MXFP8, ROWWISE_WITH_GW_HP, TENSORWISE
from search_spaces.optimizers import QUANTISED_BLOCK
from search_spaces.training.adapters import FROZEN_BLOCK

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
    """The rows in chunks of at most BLOCK_CHUNK_ELEMENTS, or one row, so that temporaries are small."""
    # Elements that are quantised or dequantised at once: 16 MiB of fp32.
    return torch.split(rows, max((1 << 22) // max(rows.shape[1], 1), 1))


def _pack(rows: Tensor) -> Tensor:
    count, columns = rows.shape
    filled = functional.pad(rows.float(), (0, -columns % QUANTISED_BLOCK))
    codes, largest = encode(filled.reshape(-1, QUANTISED_BLOCK))
    unpadded = codes.view(count, -1)[:, :columns]
    return torch.cat((unpadded.view(torch.uint8), largest.view(count, -1).view(torch.uint8)), dim=1)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Scaled(NamedTuple):
    """A matrix in float8."""

    values: Tensor
    unit: Tensor
    """Factor from values to the numbers that they represent: one fp32 number, one for each row [rows, 1], or with `mxfp8` a
    power of two for each `MX_BLOCK` numbers of a row, in e8m0 [rows, blocks]."""


def float8_linear(x: Tensor, weight: Tensor, recipe: str = TENSORWISE) -> Tensor:
    """`x` [..., inputs] times the transpose of `weight` [outputs, inputs], both rounded to float8, in the dtype of `x`.

    1. Each operand on this rank is scaled so that its largest magnitude (`rowwise`: of each row along which the product sums;
       `mxfp8`: of each 32 numbers of such a row) becomes the largest number of its float8 dtype or half of it, and rounded: to
       e4m3, but with `tensorwise` gradients of outputs to e5m2, which has a wider range and less precision.
    2. All three products (the result, the gradients of inputs and of weights) use such operands, accumulate in fp32, and are
       multiplied by the units of both. Only the result uses fast accumulation. With `rowwise_with_gw_hp` the gradient of
       weights is a product of bf16, and the gradient of inputs has one scale for the weight.
    3. Like `functional.linear`, it saves the unrounded inputs and weights for backward, which rounds them again. So a frozen
       matrix saves no inputs.
    """
    if not x.numel():  # an expert without tokens: there is no largest magnitude
        return functional.linear(x, weight)
    result: Tensor = _Float8Product.apply(x, weight, recipe)  # type: ignore[no-untyped-call]
    return result


MX_BLOCK = 32
"""Numbers that share a scale [Open Compute Project, Microscaling Formats 1.0]."""


def scaled(matrix: Tensor, dtype: torch.dtype, recipe: str = TENSORWISE) -> Scaled:
    """The matrix [rows, n] in `dtype`, E4M3 or E5M2. An element that is not finite makes all that shares its scale NaN."""
    if recipe == MXFP8:
        return _scaled_blocks(matrix)
    whole = recipe == TENSORWISE
    least, most = torch.aminmax(matrix) if whole else torch.aminmax(matrix, dim=1, keepdim=True)
    # fp64, so that compiled and eager blocks compute the same scale [torchao.float8.float8_utils.amax_to_scale].
    # Lower bound of a tensor's largest magnitude, so that zeros have a scale.
    largest = torch.maximum(most, -least).double().clamp(min=1e-12)
    scale = (torch.finfo(dtype).max / largest).float()
    scale = scale if whole else torch.exp2(torch.floor(torch.log2(scale)))
    # View with one dimension, so that the products are fp32 and are rounded only once, to 8 bits.
    return Scaled((matrix * (scale.view(1) if whole else scale)).to(dtype), scale.reciprocal())


def _scaled_blocks(matrix: Tensor) -> Scaled:
    """In e4m3, with the least power of two for each block that overflows nowhere [torchao's RCEIL, as cuBLAS defines it]."""
    blocks = matrix.float().reshape(len(matrix), -1, MX_BLOCK)
    largest = blocks.abs().amax(dim=2, keepdim=True)
    exponent = (largest / torch.finfo(E4M3).max).log2().ceil().clamp(-127, 127)
    values = (blocks * torch.exp2(-exponent)).clamp(-448, 448)
    return Scaled(values.to(E4M3).view_as(matrix), torch.exp2(exponent).to(torch.float8_e8m0fnu).view(len(matrix), -1))


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        of_input, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_input else None)
        ctx.recipe = recipe
        inputs, matrix = scaled(_rows(x), E4M3, recipe), scaled(weight, E4M3, recipe)
        return _multiply(inputs, matrix, x.dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        recipe, rows, dtype = ctx.recipe, _rows(gradients[0]), gradients[0].dtype
        whole, of_input, of_weight = recipe == TENSORWISE, None, None
        gradient = scaled(rows, E5M2 if whole else E4M3, recipe)
        if ctx.needs_input_grad[0]:
            if recipe == ROWWISE_WITH_GW_HP:
                matrix = _in_common_scale(weight)
            else:
                matrix = _transpose(scaled(weight, E4M3)) if whole else scaled(weight.T.contiguous(), E4M3, recipe)
            of_input = _multiply(gradient, matrix, dtype).view(*gradients[0].shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            if recipe == ROWWISE_WITH_GW_HP:
                of_weight = rows.T @ _rows(x)
            elif whole:
                outputs, inputs = (
                    _transpose(Scaled(_pad_rows(part.values), part.unit)) for part in (gradient, scaled(_rows(x), E4M3))
                )
                of_weight = _multiply(outputs, inputs, dtype)
            else:
                outputs, inputs = (scaled(_pad_rows(part).T.contiguous(), E4M3, recipe) for part in (rows, _rows(x)))
                of_weight = _multiply(outputs, inputs, dtype)
        return of_input, of_weight, None


def _in_common_scale(weight: Tensor) -> Scaled:
    """The transpose of a weight, all rows of which have one scale, a power of two."""
    by_rows = scaled(weight.reshape(1, -1), E4M3, ROWWISE_WITH_GW_HP)
    return Scaled(by_rows.values.view_as(weight).T.contiguous(), by_rows.unit.expand(weight.shape[1], 1))


def _multiply(left_operand: Scaled, right_operand: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """[n, k] times the transpose of [m, k], the only operand order that float8 products support."""
    left, right, factor = left_operand.unit, right_operand.unit, None
    if left.dtype == torch.float8_e8m0fnu:
        left, right = _swizzled(left), _swizzled(right)
    elif left.dim() == 2 and fast:
        right = right.T
    elif left.dim() == 2:
        # torch's kernel for rows is slow without fast accumulation: the result is scaled afterwards [torchao, float8_ops.py].
        factor = left * right.T
        left = right = left.new_ones(())
    result: Tensor = torch._scaled_mm(
        left_operand.values, right_operand.values.T, scale_a=left, scale_b=right, out_dtype=dtype, use_fast_accum=fast
    )
    return result if factor is None else result.mul_(factor)


def _swizzled(units: Tensor) -> Tensor:
    """Units of blocks in the order of cuBLAS ["1D Block Scaling Factors Layout"]: tiles of 128 rows and 4 blocks."""
    rows, blocks = units.shape
    padded = functional.pad(units.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(len(padded) // 128, 4, 32, -1, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


def _transpose(matrix: Scaled) -> Scaled:
    return Scaled(matrix.values.T.contiguous(), matrix.unit)


def _pad_rows(matrix: Tensor) -> Tensor:
    """The matrix, padded with rows of zeros to a multiple of a block."""
    # Devices with float8 products sum over a multiple of 16 rows, with `mxfp8` of 32.
    missing = -len(matrix) % MX_BLOCK
    bits = matrix.view(torch.uint8) if matrix.dtype.itemsize == 1 else matrix
    return functional.pad(bits, (0, 0, 0, missing)).view(matrix.dtype) if missing else matrix


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


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
        self._blocks = -(-self._length // FROZEN_BLOCK)
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
        self._fill(flat[middle:], start + middle - edge, self._blocks * FROZEN_BLOCK * self._bits // 8, slice(edge, None))

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
    filled = nn.functional.pad(matrix.float().contiguous(), (0, -matrix.shape[1] % FROZEN_BLOCK)).view(-1, FROZEN_BLOCK)
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
    blocks = rows * -(-length // FROZEN_BLOCK)
    largest = packed[: blocks * SCALE_BYTES].view(torch.float32)
    codes = packed[blocks * SCALE_BYTES :]
    if values is None:
        whole, unit = codes.view(torch.int8).to(dtype), largest / LARGEST
    else:
        whole, unit = nn.functional.embedding(codes.int(), values.to(dtype)), largest
    scaled = whole.view(blocks, FROZEN_BLOCK).mul_(unit.to(dtype)[:, None])
    return scaled.view(rows, -1)[:, :length]


def pairs_of_codes(like: Tensor) -> Tensor:
    """[256, 2]: the values of each byte of two codes."""
    levels = torch.tensor(NF4, dtype=like.dtype, device=like.device)
    return torch.cartesian_prod(levels, levels)
