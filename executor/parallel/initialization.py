"""Initial values of parameters, computed per element: any rank can create any part of any parameter, bitwise equal."""

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.distributed.tensor import DTensor

INITIAL_DEVIATION = 0.02
CHUNK_ELEMENTS = 1 << 18
"""Elements drawn at a time, so that temporaries stay in a processor's cache. Values do not depend on it."""
_LEVELS = 1 << 16


class Distribution(StrEnum):
    """Distribution of a parameter's initial values."""

    NORMAL = "normal"
    """Normal with mean 0 and deviation `INITIAL_DEVIATION`, in 65,536 equally likely values; the largest is 4.3 deviations."""
    ZEROS = "zeros"
    ONES = "ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterWindow:
    """A part of a whole parameter: `rows` rows of `run` consecutive elements, at a distance of `stride` positions.

    A position is an element's index in the flattened whole parameter (row-major). Elements of the part are counted in the same
    order: element i is at position `offset + i // run * stride + i % run`.
    """

    offset: int
    stride: int
    rows: int
    run: int

    @property
    def elements(self) -> int:
        """Number of elements of the part."""
        return self.rows * self.run


def window(shape: Sequence[int], dimension: int | None = None, first: int = 0, size: int = 0) -> ParameterWindow:
    """The window of a whole parameter of `shape`, or of its indices [`first`, `first + size`) along one dimension.

    Raises:
        ValueError: the part is not within the parameter.
    """
    whole = torch.Size(shape).numel()
    if dimension is None:
        return ParameterWindow(offset=0, stride=whole, rows=1, run=whole)
    if not 0 <= first <= first + size <= shape[dimension]:
        raise ValueError(f"{size} indices from {first} on are not within {shape[dimension]}; check the slice's sizes")
    before, after = torch.Size(shape[:dimension]).numel(), torch.Size(shape[dimension + 1 :]).numel()
    return ParameterWindow(offset=first * after, stride=shape[dimension] * after, rows=before, run=size * after)


class FirstValues(ABC):
    """The initial values of a flat vector. Any range of it can be computed independently."""

    elements: int

    @abstractmethod
    def fill(self, out: Tensor, start: int = 0) -> None:
        """Write the elements from `start` on to `out`, which is contiguous, of any dtype and on any device.

        A tensor without data is not changed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(FirstValues):
    """Values that depend only on the seed, the whole parameter's name and an element's position.

    1. SHA-256 of seed and name gives two 32-bit keys.
    2. A 32-bit hash mixes each position with the keys; its upper 16 bits select a quantile of the normal distribution from a
       table. All of this is exact, so that every device computes the same bits.
    3. In a wider dtype, values are rounded to the parameter's own `dtype`: an fp32 master starts equal to its bf16 parameter.

    Only the requested elements are drawn; temporaries take the memory of a few chunks.
    """

    name: str
    """Name in the whole model."""
    seed: int
    dtype: torch.dtype
    window: ParameterWindow
    """The part of the whole parameter."""
    kind: Distribution = Distribution.NORMAL

    @property
    def elements(self) -> int:  # type: ignore[override]
        """Number of elements of the part."""
        return self.window.elements

    def sliced(self, first: int, size: int) -> "Drawn":
        """The elements [`first`, `first + size`) of each of the window's rows."""
        return replace(self, window=replace(self.window, offset=self.window.offset + first, run=size))

    @torch.no_grad()
    def fill(self, out: Tensor, start: int = 0) -> None:
        if is_fake(out) or out.device.type == "meta":
            return
        if self.kind is not Distribution.NORMAL:
            out.fill_(float(self.kind is Distribution.ONES))
            return
        digest = hashlib.sha256(f"{self.seed}:{self.name}".encode()).digest()
        mixer = _Mixer(int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big"), self.dtype, out.device)
        run, done, flat = self.window.run, 0, out.view(-1)
        while done < flat.numel():
            row, column = divmod(start + done, run)
            # The rest of a row, or as many whole rows as fit in a chunk.
            width = min(run - column, CHUNK_ELEMENTS, flat.numel() - done)
            rows = max(min(CHUNK_ELEMENTS, flat.numel() - done) // run, 1) if width == run else 1
            piece = flat[done : done + rows * width].view(rows, width)
            mixer.fill(piece, self.window.offset + row * self.window.stride + column, self.window.stride)
            done += rows * width


class _Mixer:
    """Writes values of one parameter at given positions. Its scratch memory is allocated once."""

    def __init__(self, first_key: int, second_key: int, dtype: torch.dtype, device: torch.device) -> None:
        self._keys = _signed(first_key), _signed(second_key)
        self._dtype, self._table = dtype, _quantiles().to(device)
        self._count = torch.arange(CHUNK_ELEMENTS, dtype=torch.int32, device=device)
        self._mixed, self._shifted = torch.empty_like(self._count), torch.empty_like(self._count)
        self._values = torch.empty(CHUNK_ELEMENTS, dtype=torch.float32, device=device)

    def fill(self, out: Tensor, first: int, stride: int) -> None:
        """Fill `out` [rows, run], at most a chunk; row r has the positions from `first + r * stride` on."""
        rows, run = out.shape
        x, shifted, values = (scratch[: out.numel()].view(rows, run) for scratch in (self._mixed, self._shifted, self._values))
        starts = self._count[:rows, None] * _signed(stride) + _signed(first)
        torch.add(starts, self._count[:run], out=x)
        x.bitwise_xor_(self._keys[0])
        # `triple32` [Wellons 2018, Prospecting for Hash Functions], whose last shift would not change bits used here.
        for step, (shift, multiplier) in enumerate(((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))):
            # Right shifts of signed integers are arithmetic; the mask makes them logical.
            torch.bitwise_right_shift(x, shift, out=shifted)
            x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(multiplier))
            if step == 0:
                x.add_(self._keys[1])
        x.bitwise_right_shift_(16).add_(_LEVELS // 2)
        torch.index_select(self._table, 0, x.view(-1), out=values.view(-1))
        out.copy_(values if self._dtype.itemsize >= values.itemsize else values.to(self._dtype))


class Given(FirstValues):
    """The values of a tensor: of a user's module, or of a parameter that already is whole on this rank."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach().reshape(-1)
        self.elements = values.numel()

    def fill(self, out: Tensor, start: int = 0) -> None:
        out.view(-1).copy_(self._values[start : start + out.numel()])


class Joined(FirstValues):
    """Concatenated values: a rank's master vector, or a parameter that combines several named ones along dimension 0."""

    def __init__(self, parts: Sequence[FirstValues]) -> None:
        self.parts = tuple(parts)
        self.elements = sum(part.elements for part in parts)

    def fill(self, out: Tensor, start: int = 0) -> None:
        flat, first = out.view(-1), 0
        for part in self.parts:
            begin, end = max(start, first), min(start + flat.numel(), first + part.elements)
            if begin < end:
                part.fill(flat[begin - start : end - start], begin - first)
            first += part.elements


class Share(FirstValues):
    """One rank's padded share of a parameter: `elements` of the values from `first` on, then zeros."""

    def __init__(self, values: FirstValues, first: int, elements: int) -> None:
        self._values, self._first, self.elements = values, first, elements

    def fill(self, out: Tensor, start: int = 0) -> None:
        flat = out.view(-1)
        available = min(max(self._values.elements - self._first - start, 0), flat.numel())
        if available:
            self._values.fill(flat[:available], self._first + start)
        flat[available:].zero_()


def draw(
    name: str, shape: Sequence[int], seed: int, dtype: torch.dtype, dimension: int | None = None, first: int = 0, size: int = 0
) -> Drawn:
    """A normally distributed parameter of `shape`, or its indices [`first`, `first + size`) along one dimension.

    Raises:
        ValueError: the parameter has too many elements, or the part is not within it.
    """
    # Maximum elements of a whole parameter, since positions are hashed in 32 bits.
    most_positions = 1 << 32
    if torch.Size(shape).numel() > most_positions:
        raise ValueError(f"{name} has more than {most_positions:,} elements; cut it into several parameters")
    return Drawn(name=name, seed=seed, dtype=dtype, window=window(shape, dimension, first, size))


def is_plain(parameter: Tensor) -> bool:
    """Whether values are all of it: not of a library's own type, such as bitsandbytes' 4-bit weights, which quantise themselves
    when they are first moved, and move their scales too only by their own `to`. Tensors of a dry run are plain."""
    return all(type(value) in (nn.Parameter, Tensor, FakeTensor) for value in (parameter, parameter.data))


def move_without_memory(module: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device by ones on `device` with the same shapes and empty storages.

    `resize_` of the storage allocates a parameter's memory.
    """

    def make(parameter: nn.Parameter) -> Tensor:
        empty = torch.empty_like(parameter, device=device)
        empty.untyped_storage().resize_(0)
        return empty

    _replace(module, make)


@torch.no_grad()
def materialise(
    module: nn.Module, values: Mapping[str, FirstValues], device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Allocate the parameters that are on the meta device and write their initial values; of a DTensor, this rank's part.

    `dtype`: of floating-point parameters; None: unchanged.
    """
    names = [name for name, parameter in module.named_parameters() if parameter.device.type == "meta"]

    def allocated(parameter: nn.Parameter) -> Tensor:
        # Bytes of quantised parameters keep their dtype.
        return torch.empty_like(parameter, device=device, dtype=dtype if parameter.is_floating_point() else None)

    _replace(module, allocated)
    for name in names:
        parameter = module.get_parameter(name)
        values[name].fill(parameter.to_local() if isinstance(parameter, DTensor) else parameter.data)


def _replace(module: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace the parameters on the meta device; tied ones stay tied."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for inner in module.modules():
        for key, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.device.type == "meta":
                if parameter not in replacements:
                    replacements[parameter] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                setattr(inner, key, replacements[parameter])


@functools.cache
def _quantiles() -> Tensor:
    """Quantiles of the normal distribution at midpoints of 65,536 equal parts, times the deviation; fp32, exactly symmetric.

    Their standard deviation is 0.99999 of `INITIAL_DEVIATION`.
    """
    middles = (torch.arange(_LEVELS // 2, dtype=torch.float64) + 0.5) / _LEVELS + 0.5
    # Values are multiples of it, so that they are exact in fp32 and do not depend on a processor's rounding.
    unit = 2.0**-26
    upper = (torch.special.ndtri(middles) * (INITIAL_DEVIATION / unit)).round() * unit
    return torch.cat((-upper.flip(0), upper)).float()


def _signed(number: int) -> int:
    """The lower 32 bits of `number` as a signed integer (two's complement)."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
