"""How communication is chunked to overlap with computation. Does not import torch: engine and prediction import it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

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
