"""The layout of parameters in flat vectors and buckets, this rank's shard of them, and the second copy of nearby ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.parallel.collectives import ProcessGroup, mark, shares_memory
from executor.parallel.copies import Copy, CopyEngine, HostPool, Staging
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


def fill(slots: Sequence[Slot], rows: Tensor) -> None:
    """Copy gathered rows [ranks, concatenated shares of `slots`] to the parameters, those without padding in one operation."""
    ranks = len(rows)
    fits = [slot.shard_elements * ranks == slot.elements and slot.parameter.dtype == rows.dtype for slot in slots]
    widths = [slot.shard_elements for slot in slots]
    outputs = [
        slot.parameter.data.view(ranks, width) if whole else rows.new_empty(ranks, width)
        for slot, width, whole in zip(slots, widths, fits, strict=True)
    ]
    torch.split_with_sizes_copy(rows, widths, dim=1, out=outputs)
    padded = [(slot, output) for slot, output, whole in zip(slots, outputs, fits, strict=True) if not whole]
    if padded:
        targets = [slot.parameter.data.view(-1) for slot, _ in padded]
        torch._foreach_copy_(targets, [from_rows(output, slot) for slot, output in padded])


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


Range = tuple[int, int]
"""Half-open range of elements of the flat master vector and the frozen parameters after it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A part of the shard on the device; `copies` are the transfers in flight that fill it."""

    values: Tensor
    copies: tuple[Copy, ...] = ()

    def wait(self) -> None:
        """Make the current stream wait for the values."""
        for copy in self.copies:
            copy.wait()

    def before(self) -> AbstractContextManager[object]:
        """Context in which a started collective waits for the values; the current stream need not wait for them."""
        return self.copies[-1].followed() if self.copies else nullcontext()


class ParameterShard(ABC):
    """A flat vector of parameters in their own dtype: first those that the optimizer updates and passes in the master's dtype,
    then frozen ones, which are written once.
    """

    reads_ahead = 0
    """Units that may be expected at once; 0: `expect` does nothing."""

    def expect(self, ranges: Sequence[Range]) -> None:  # noqa: B027  values in memory need not be prefetched
        """Announce that these ranges will be read soon, though not next."""

    @abstractmethod
    def read(self, ranges: Sequence[Range]) -> Loaded:
        """The concatenated elements of `ranges` on the device; a view if nothing has to move."""

    def copy_to(self, targets: Sequence[Tensor], ranges: Sequence[Range]) -> None:
        """Copy the elements of each range to the target with the same index, in one operation, which also casts."""
        if targets:  # a pipeline rank whose layers are all frozen updates nothing
            torch._foreach_copy_([*targets], self._views(ranges))

    def _views(self, ranges: Sequence[Range]) -> list[Tensor]:
        """The elements of each range, in the dtype in which they are stored."""
        loaded = [self.read((span,)) for span in ranges]
        for view in loaded:
            view.wait()
        return [view.values for view in loaded]

    @abstractmethod
    def accept_from_device(self, start: int, values: Tensor) -> None:
        """Take updated elements from `start` on, on the device; the caller does not change them before the next update."""

    @abstractmethod
    def accept_from_host(self, start: int, values: Tensor) -> None:
        """Take updated elements from `start` on, in host memory; at most one chunk of the optimizer."""

    @abstractmethod
    def finish(self) -> None:
        """Return when reads see everything that was accepted."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """The tensors kept on the device between steps."""

    def close(self) -> None:  # noqa: B027
        """Free resources other than memory."""


class MasterShard(ParameterShard):
    """The master vector itself, on the device and cast when read, followed by `frozen` parameters in the target dtype."""

    def __init__(self, master: Tensor, dtype: torch.dtype, frozen: Tensor | None = None) -> None:
        self.master, self.dtype = master, dtype
        self.frozen = torch.empty(0, dtype=dtype, device=master.device) if frozen is None else frozen

    def read(self, ranges: Sequence[Range]) -> Loaded:
        edge = self.master.numel()
        trained = [(start, min(end, edge)) for start, end in ranges if start < edge]
        frozen = [(max(start - edge, 0), end - edge) for start, end in ranges if end > edge]
        parts = [joined(self.master, trained).to(self.dtype)] if trained else []
        parts += [joined(self.frozen, frozen)] if frozen else []
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not shares_memory(values, self.master) and not shares_memory(values, self.frozen):
            mark("buffers", values)
        return Loaded(values)

    def _views(self, ranges: Sequence[Range]) -> list[Tensor]:
        return [self.master[start:end] for start, end in ranges]  # an update writes only trained parameters

    def accept_from_device(self, start: int, values: Tensor) -> None:
        """Nothing to do: the values are the master vector's memory."""

    def accept_from_host(self, start: int, values: Tensor) -> None:
        self.master[start : start + values.numel()].copy_(values)

    def finish(self) -> None:
        """Nothing to do: no transfers are in flight."""

    def tensors(self) -> Iterator[Tensor]:
        if self.frozen.numel():
            yield self.frozen


class DeviceShard(ParameterShard):
    """Parameters on the device, for an optimizer whose master vector is at least partly on the host."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, arrivals: Staging) -> None:
        self._values = torch.empty(elements, dtype=dtype, device=device)
        self._arrivals = arrivals

    def read(self, ranges: Sequence[Range]) -> Loaded:
        values = joined(self._values, ranges)
        if len(ranges) > 1:
            mark("buffers", values)
        return Loaded(values)

    def accept_from_device(self, start: int, values: Tensor) -> None:
        self._values[start : start + values.numel()].copy_(values)

    def accept_from_host(self, start: int, values: Tensor) -> None:
        self._arrivals.send(self._values[start : start + values.numel()], values)

    def finish(self) -> None:
        self._arrivals.finish()

    def tensors(self) -> Iterator[Tensor]:
        yield self._values


class HostShard(ParameterShard):
    """Parameters in pinned host memory (`offload_param`), read over the host link for each gather.

    The optimizer may overwrite it immediately: a gradient reaches the host after everything that the device's current stream
    has waited for, including every gather of the step.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, pool: HostPool, copies: CopyEngine) -> None:
        self._values = pool.zeros(elements, dtype, pinned=True)
        self._device, self._copies = device, copies
        self._leaving: list[Copy] = []

    def read(self, ranges: Sequence[Range]) -> Loaded:
        values = torch.empty(sum(end - start for start, end in ranges), dtype=self._values.dtype, device=self._device)
        mark("buffers", values)
        parts = torch.split(values, [end - start for start, end in ranges])
        copies = [self._copies.start(part, self._values[start:end]) for part, (start, end) in zip(parts, ranges, strict=True)]
        return Loaded(values, tuple(copies))

    def accept_from_device(self, start: int, values: Tensor) -> None:
        cast = values.to(self._values.dtype)
        if cast is not values:
            mark("buffers", cast)
        self._leaving.append(self._copies.start(self._values[start : start + values.numel()], cast))

    def accept_from_host(self, start: int, values: Tensor) -> None:
        self._values[start : start + values.numel()].copy_(values)

    def finish(self) -> None:
        while self._leaving:
            self._leaving.pop().end()

    def tensors(self) -> Iterator[Tensor]:
        return iter(())


class WithQuantised(ParameterShard):
    """`unquantised`, followed from `start` on by the bytes of the `quantised` parameters. A read is from one of the two."""

    def __init__(self, unquantised: ParameterShard, quantised: ParameterShard, start: int) -> None:
        self.unquantised, self.quantised, self.start = unquantised, quantised, start

    def read(self, ranges: Sequence[Range]) -> Loaded:
        if ranges[0][0] < self.start:
            return self.unquantised.read(ranges)
        return self.quantised.read([(first - self.start, end - self.start) for first, end in ranges])

    def accept_from_device(self, start: int, values: Tensor) -> None:
        self.unquantised.accept_from_device(start, values)

    def accept_from_host(self, start: int, values: Tensor) -> None:
        self.unquantised.accept_from_host(start, values)

    def finish(self) -> None:
        self.unquantised.finish()

    def tensors(self) -> Iterator[Tensor]:
        yield from self.unquantised.tensors()
        yield from self.quantised.tensors()

    def close(self) -> None:
        self.unquantised.close()


def joined(vector: Tensor, ranges: Sequence[Range]) -> Tensor:
    """The elements of `ranges` in one vector; a view if there is only one range."""
    if len(ranges) == 1:
        return vector[ranges[0][0] : ranges[0][1]]
    return torch.cat([vector[start:end] for start, end in ranges])


class NearCopies:
    """Shards the result of a gather over all ranks over a group of nearby ranks [Wang et al. 2023, ZeRO++, 3.2: hpZ].

    Of the gathered rows of each parameter, rank k of the s ranks in the group keeps the k-th of s equal parts. Concatenated,
    the parts are bitwise equal to the rows, in whatever format they were sent. They are valid from the first gather after an
    update to the next update, and permanently for frozen parameters.
    """

    def __init__(self, group: ProcessGroup, ranks: int) -> None:
        """`ranks`: number of ranks over which parameters are sharded, a multiple of the group's size."""
        self.group = group
        self._rows = ranks // group.size
        self._kept: dict[Slot, Tensor] = {}
        self._current: set[Slot] = set()

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._current

    def keep(self, slot: Slot, rows: Tensor) -> None:
        """Keep this rank's part of a parameter's rows [ranks, …]."""
        first = self.group.rank * self._rows
        part = rows[first : first + self._rows]
        if slot not in self._kept:
            self._kept[slot] = torch.empty(part.shape, dtype=part.dtype, device=part.device)
            mark("parameters", self._kept[slot])
        self._kept[slot].copy_(part)
        self._current.add(slot)

    def read(self, slots: Sequence[Slot]) -> Tensor:
        """This rank's rows of `slots`, flattened; each row concatenates the shares of one rank of the gather."""
        joined = torch.cat([self._kept[slot] for slot in slots], dim=1).view(-1)
        mark("buffers", joined)
        return joined

    def parameters_changed(self) -> None:
        """Invalidate the copies of trained parameters."""
        self._current = {slot for slot in self._current if not slot.parameter.requires_grad}

    def tensors(self) -> Iterator[Tensor]:
        """The kept tensors."""
        yield from self._kept.values()
