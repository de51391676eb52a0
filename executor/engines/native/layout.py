"""The layout of parameters: each one's shard in a flat master vector, and its reduce bucket."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from search_spaces.communication import cut


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Slot:
    """One parameter. Every rank holds an equal, padded share of each parameter."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    elements: int
    shard_elements: int
    """Elements of one rank's share: `elements / ranks`, rounded up, perhaps to whole blocks."""
    offset: int
    """First element of this rank's share in the flat master vector; frozen parameters come after it."""
    bucket: int
    column: int
    """First column of the share in the bucket's matrix of shape [ranks, columns]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """All slots in the order in which gradients are expected (last parameter first), cut into fixed reduce buckets.

    The order is fixed and the same on every rank, so that ranks on which a parameter got no gradient still reduce the same
    buckets in the same order.
    """

    ranks: int
    slots: tuple[Slot, ...]
    buckets: tuple[tuple[Slot, ...], ...]
    master_elements: int
    """End of this rank's flat master vector, including padding."""

    def columns(self, bucket: int) -> int:
        """Elements that each rank owns of a bucket."""
        return sum(slot.shard_elements for slot in self.buckets[bucket])

    def start(self, bucket: int) -> int:
        """Offset of a bucket's share in the flat master vector, in which buckets are consecutive."""
        return self.buckets[bucket][0].offset


def make_layout(
    parameters: Sequence[tuple[str, nn.Parameter]],
    ranks: int,
    reduce_bucket_size: int,
    share_block: Callable[[int], int] = lambda _: 1,
    offset: int = 0,
) -> BucketLayout:
    """Fill buckets up to `reduce_bucket_size` elements; a larger parameter gets its own bucket.

    Args:
        parameters: names and parameters, in the order of forward.
        ranks: number of ranks over which each parameter is sharded.
        reduce_bucket_size: in elements.
        share_block: elements of a parameter -> the number that a share is a multiple of, if there are several ranks.
        offset: first element of the vector.
    """
    buckets: list[tuple[Slot, ...]] = []
    for bucket_parameters in cut([*reversed(parameters)], lambda item: item[1].numel(), reduce_bucket_size):
        bucket: list[Slot] = []
        column = 0
        for name, parameter in bucket_parameters:
            elements = parameter.numel()
            block = share_block(elements) if ranks > 1 else 1
            shard = -(-elements // (ranks * block)) * block
            bucket.append(Slot(
                name=name, parameter=parameter, shape=parameter.shape, elements=elements, shard_elements=shard,
                offset=offset, bucket=len(buckets), column=column,
            ))  # fmt: skip
            offset, column = offset + shard, column + shard
        buckets.append(tuple(bucket))
    slots = tuple(slot for bucket in buckets for slot in bucket)
    return BucketLayout(ranks=ranks, slots=slots, buckets=tuple(buckets), master_elements=offset)


def as_rows(value: Tensor, slot: Slot, ranks: int) -> Tensor:
    """A full parameter or gradient as [ranks, shard_elements], padded with zeros at the end."""
    flat = value.reshape(-1)
    padding = slot.shard_elements * ranks - slot.elements
    return (functional.pad(flat, (0, padding)) if padding else flat).view(ranks, slot.shard_elements)


def from_rows(rows: Tensor, slot: Slot) -> Tensor:
    """The inverse of `as_rows`: [ranks, shard_elements] as the flat parameter without its padding."""
    return rows.reshape(-1)[: slot.elements]


def unpack(rows: Tensor, slots: Sequence[Slot]) -> Iterator[tuple[Slot, Tensor]]:
    """The flat parameters in gathered rows [ranks, concatenated shares of `slots`]."""
    column = 0
    for slot in slots:
        yield slot, from_rows(rows[:, column : column + slot.shard_elements], slot)
        column += slot.shard_elements


def ranges(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """Half-open ranges of this rank's shares of `slots` in the master vector; adjacent ones are merged."""
    merged: list[tuple[int, int]] = []
    for slot in slots:
        end = slot.offset + slot.shard_elements
        if merged and merged[-1][1] == slot.offset:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((slot.offset, end))
    return merged
