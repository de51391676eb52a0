"""How communication is compressed and chunked: formats of 8-bit integers and signs, and chunks that overlap."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from search_spaces.optimizers import QUANTISED_BLOCK

SCALE_BYTES = 4
"""Size of a block's fp32 scale."""
INT8 = "int8"
"""Value of `gather_dtype` and `reduce_dtype`: blocks of QUANTISED_BLOCK integers. Parameters with fewer than LEAST_QUANTISED
elements are gathered uncompressed."""
INTEGER_BYTES = 1 + SCALE_BYTES / QUANTISED_BLOCK
"""Mean bytes per element in this format."""
REDUCED_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, INT8: INTEGER_BYTES}
"""`reduce_dtype` -> bytes per gradient element sent."""
SIGN_BLOCK = 1024
"""Momentum elements that share one scale when signs are sent; a rank's share of a momentum is a multiple of it."""
SIGN_BYTES = 1 / 8 + SCALE_BYTES / SIGN_BLOCK
"""Mean bytes per element when signs are sent."""


def integer_bytes(elements: int) -> int:
    """Bytes of this many contiguous elements as integers with their scales; the last block may be partial."""
    return elements + SCALE_BYTES * -(-elements // QUANTISED_BLOCK)


def sign_share(elements: int, ranks: int) -> int:
    """Momentum elements that each rank owns, padding included."""
    return -(-elements // (ranks * SIGN_BLOCK)) * SIGN_BLOCK


def sign_bytes(elements: int) -> int:
    """Bytes of whole blocks of signs with their scales."""
    return elements // 8 + SCALE_BYTES * (elements // SIGN_BLOCK)


Item = TypeVar("Item")

ROW_PARTS = 4
"""Number of token chunks of a row-parallel product whose reduction overlaps with it (`async_tensor_parallel`)."""

IN_FLIGHT = 2
"""Buckets in flight at once if communication overlaps: one is sent while the next one fills."""
PIECE_ELEMENTS = 4_000_000
"""Maximum number of elements moved into a bucket by one operation. Moving more takes a GPU longer than launching the
operation, so larger pieces would cost memory and gain nothing."""


def cut(items: Sequence[Item], elements: Callable[[Item], int], limit: float) -> Iterator[tuple[Item, ...]]:
    """Adjacent items in groups of at most `limit` elements; a larger item forms its own group."""
    group: list[Item] = []
    filled = 0
    for item in items:
        if group and filled + elements(item) > limit:
            yield tuple(group)
            group, filled = [], 0
        group.append(item)
        filled += elements(item)
    if group:
        yield tuple(group)
