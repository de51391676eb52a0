"""One recorded micro-batch of a user's module, and what those of two sizes say about any size."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from executor.dry.operators import Shape
from executor.errors import FactoryError
from search_spaces.models.module_profile import Affine, BlockWork, MatrixProduct, Moment, MomentKind, Work

SIZES = (2, 3)
"""Samples of the two micro-batches from which everything is extrapolated; some modules squeeze a batch of one sample."""


@dataclass(slots=True)
class RecordedPart:
    """What a part of a micro-batch computes."""

    products: list[Shape] = field(default_factory=list)
    flops: int = 0
    attention_flops: int = 0
    moved_bytes: int = 0
    operators: int = 0


@dataclass(slots=True)
class RecordedMicroBatch:
    """One recorded micro-batch."""

    marks: list[tuple[MomentKind, int]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    parts: dict[tuple[str, int], RecordedPart] = field(default_factory=dict)
    hidden_bytes: int = 0
    """Of the first block's output."""

    def add(self, mark: MomentKind, index: int, peak: int, level: int) -> None:
        """Append a moment."""
        self.marks.append((mark, index))
        self.peaks.append(peak)
        self.levels.append(level)


def with_levels(micro: RecordedMicroBatch, positions: Sequence[int], changes: Sequence[int]) -> RecordedMicroBatch:
    """The micro-batch with the memory at its marks: `positions` of each mark among the `changes` of memory, in bytes."""
    level = start = 0
    for position in positions:
        peak = level
        for change in changes[start:position]:
            level += change
            peak = max(peak, level)
        micro.peaks.append(peak)
        micro.levels.append(level)
        start = position
    return micro


def moments_of(reference: str, small: RecordedMicroBatch, large: RecordedMicroBatch) -> tuple[Moment, ...]:
    """The moments for any size.

    Raises:
        FactoryError: the two micro-batches have other marks.
    """
    if small.marks != large.marks:
        problem = "its blocks run in another order, or other ones run, with another number of samples"
        raise FactoryError(f"{reference}: {problem}; measure it by trials (`autotune sweep`)")
    return tuple(
        Moment(mark=mark, index=index, peak=affine(*peaks), level=affine(*levels))
        for (mark, index), peaks, levels in zip(
            small.marks, zip(small.peaks, large.peaks, strict=True), zip(small.levels, large.levels, strict=True), strict=True
        )
    )


def block_work(pair: tuple[RecordedMicroBatch, ...], index: int) -> BlockWork:
    """The computation of a block, or of everything outside of the blocks, for any size."""
    small, large = pair
    return BlockWork(
        forward=_work(small.parts.get(("forward", index), RecordedPart()), large.parts.get(("forward", index), RecordedPart())),
        backward=_work(
            small.parts.get(("backward", index), RecordedPart()), large.parts.get(("backward", index), RecordedPart())
        ),
    )


def _work(small: RecordedPart, large: RecordedPart) -> Work:
    counted = Counter(_products(small.products, large.products))
    return Work(
        products=tuple(
            MatrixProduct(rows=rows, inner=inner, outer=outer, count=count) for (rows, inner, outer), count in counted.items()
        ),
        flops=affine(small.flops, large.flops),
        attention_flops=affine(small.attention_flops, large.attention_flops),
        moved_bytes=affine(small.moved_bytes, large.moved_bytes),
        operators=max(small.operators, large.operators),
    )


def _products(small: Sequence[Shape], large: Sequence[Shape]) -> Iterator[tuple[Affine, Affine, Affine]]:
    """Shapes that are affine in the samples; if the numbers of products differ, rows are assumed to be proportional to them."""
    if len(small) != len(large):
        for rows, inner, outer in large:
            yield (0.0, rows / SIZES[1]), (float(inner), 0.0), (float(outer), 0.0)
        return
    for first, second in zip(small, large, strict=True):
        yield affine(first[0], second[0]), affine(first[1], second[1]), affine(first[2], second[2])


def backward_flops(micro: RecordedMicroBatch, index: int) -> int:
    """FLOPs in the backward of a block."""
    part = micro.parts.get(("backward", index))
    return 0 if part is None else part.flops


def affine(small: float, large: float) -> Affine:
    """The line through the values of both sizes."""
    slope = (large - small) / (SIZES[1] - SIZES[0])
    return float(small - slope * SIZES[0]), float(slope)
