"""Where every parameter lives: its shard in one flat master vector, and its bucket."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Slot:
    """One trainable parameter. Every rank holds an equal, padded share of each parameter."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    elements: int
    shard_elements: int
    """Elements of one rank's share: `elements / ranks`, rounded up."""
    offset: int
    """First element of this rank's share in the flat master vector."""
    bucket: int
    column: int
    """First column of the share in the bucket's matrix of shape [ranks, columns]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All slots in the order in which gradients are expected (last parameter first), cut into fixed reduce buckets.

    The order is fixed once and the same on every rank, so that ranks on which a parameter got no gradient still reduce the
    same buckets in the same order.
    """

    ranks: int
    slots: tuple[Slot, ...]
    buckets: tuple[tuple[Slot, ...], ...]
    master_elements: int
    """Elements of this rank's flat master vector, padding included."""

    def columns(self, bucket: int) -> int:
        """Elements that each rank owns of a bucket."""
        return sum(slot.shard_elements for slot in self.buckets[bucket])

    def start(self, bucket: int) -> int:
        """Where a bucket's share begins in the flat master vector: buckets follow one another in it."""
        return self.buckets[bucket][0].offset


def make_layout(parameters: Sequence[tuple[str, nn.Parameter]], ranks: int, reduce_bucket_size: int) -> Layout:
    """Fill buckets up to `reduce_bucket_size` elements; a larger parameter has a bucket of its own."""
    slots: list[Slot] = []
    buckets: list[list[Slot]] = []
    offset = filled = column = 0
    for name, parameter in reversed(parameters):
        elements = parameter.numel()
        if not buckets or filled + elements > reduce_bucket_size:
            buckets.append([])
            filled = column = 0
        shard = -(-elements // ranks)
        slot = Slot(
            name=name, parameter=parameter, shape=parameter.shape, elements=elements, shard_elements=shard,
            offset=offset, bucket=len(buckets) - 1, column=column,
        )  # fmt: skip
        slots.append(slot)
        buckets[-1].append(slot)
        offset, filled, column = offset + shard, filled + elements, column + shard
    fixed = tuple(tuple(bucket) for bucket in buckets)
    return Layout(ranks=ranks, slots=tuple(slots), buckets=fixed, master_elements=offset)


def as_rows(value: Tensor, slot: Slot, ranks: int) -> Tensor:
    """A full parameter or gradient as [ranks, shard_elements], padded with zeros at the end."""
    flat = value.reshape(-1)
    padding = slot.shard_elements * ranks - slot.elements
    return (functional.pad(flat, (0, padding)) if padding else flat).view(ranks, slot.shard_elements)


def from_rows(rows: Tensor, slot: Slot) -> Tensor:
    """The inverse of `as_rows`: [ranks, shard_elements] as the flat parameter without its padding."""
    return rows.reshape(-1)[: slot.elements]


def master_shards(master: Tensor, slots: Sequence[Slot]) -> Tensor:
    """This rank's shares of `slots` (in the order of their offsets) in one vector; a view where they are neighbours."""
    first, last = slots[0], slots[-1]
    end = last.offset + last.shard_elements
    if end - first.offset == sum(slot.shard_elements for slot in slots):
        return master[first.offset : end]
    return torch.cat([master[slot.offset : slot.offset + slot.shard_elements] for slot in slots])
