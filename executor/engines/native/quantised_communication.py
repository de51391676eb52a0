"""Compressed communication: sums of gradients and gathered parameters are sent as 8-bit integers."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from executor.engines.native.parameter_shard import Slot, from_rows
from executor.parallel.collectives import InFlight, ProcessGroup, mark
from executor.parallel.quantised import pack, row_chunks, unpack
from search_spaces.communication import INT8, integer_bytes
from search_spaces.optimizers import LEAST_QUANTISED
from search_spaces.trial_config import TrialConfig


class QuantisedReduceScatter:
    """Every rank sends each other rank its row in blocks of integers and sums what it receives [Wang et al. 2023, ZeRO++, 3.3:
    qgZ].

    A ring would round sums again at every rank. A rank's own row is rounded too, so that the result does not depend on the rank
    that sums. Each parameter has its own blocks, so that one that two tensor ranks hold is rounded alike on both.
    """

    def __init__(self, group: ProcessGroup, parameters: Iterable[Tensor], widths: Sequence[int], dtype: torch.dtype) -> None:
        """`parameters` yields for each parameter the rows for every rank [ranks, width]; each may be freed when the next is
        requested."""
        self._widths, self._dtype = widths, dtype
        self._sent = _packed(parameters)
        self._received = torch.empty_like(self._sent)
        for buffer in (self._sent, self._received):
            mark("buffers", buffer)
        split_sizes = [1] * group.size
        self._work = group.all_to_all(self._received, self._sent, split_sizes, split_sizes)

    def wait(self) -> Tensor:
        """The sum of this rank's rows over all ranks, concatenated over parameters [sum of widths]."""
        self._work.wait()
        total = torch.cat([self._summed(part, width) for part, width in _by_parameter(self._received, self._widths)])
        mark("buffers", total)
        return total

    def _summed(self, packed: Tensor, width: int) -> Tensor:
        total = torch.zeros(width, dtype=self._dtype, device=packed.device)
        for some in row_chunks(packed):
            total.add_(unpack(some, width, self._dtype).sum(dim=0))
        return total


class QuantisedAllReduce:
    """A quantised reduce-scatter and then an all-gather of its parts, quantised again: `value` [n] becomes the same sum on all
    ranks.

    Three calls in the same order on all ranks: constructor, `gather`, `wait`. A collective started by one ends in the next.
    """

    def __init__(self, group: ProcessGroup, value: Tensor, sizes: Sequence[int]) -> None:
        """`sizes` (sum n): elements of each parameter. Every rank sums an equal part of it, padded with zeros."""
        self._group = group
        self._targets = torch.split(value, list(sizes))
        self._widths = [-(-size // group.size) for size in sizes]
        rows = (_as_rows(target, group.size) for target in self._targets)
        self._scatter: QuantisedReduceScatter | None = QuantisedReduceScatter(group, rows, self._widths, value.dtype)
        self._gathered: tuple[InFlight, Tensor, Tensor] | None = None

    def gather(self) -> None:
        """Send this rank's sums to the others; a second call does nothing."""
        if self._scatter is None:
            return
        packed_sums = _packed(torch.split(self._scatter.wait()[None], self._widths, dim=1))
        self._scatter = None  # frees its buffers
        rows = torch.empty(self._group.size, packed_sums.shape[1], dtype=packed_sums.dtype, device=packed_sums.device)
        for buffer in (packed_sums, rows):
            mark("buffers", buffer)
        self._gathered = self._group.all_gather(rows, packed_sums.view(-1)), rows, packed_sums

    def wait(self) -> None:
        """Return when `value` is the sum."""
        self.gather()
        assert self._gathered is not None
        work, rows, _ = self._gathered
        work.wait()
        for target, (part, width) in zip(self._targets, _by_parameter(rows, self._widths), strict=True):
            start = 0
            for some in row_chunks(part):
                values = target[start : start + len(some) * width]
                values.copy_(unpack(some, width, target.dtype).reshape(-1)[: len(values)])
                start += len(some) * width


def _as_rows(flat: Tensor, ranks: int) -> Tensor:
    """Reshape to [ranks, …], padded with zeros."""
    padding = -len(flat) % ranks
    return (functional.pad(flat, (0, padding)) if padding else flat).view(ranks, -1)


def _packed(parameters: Iterable[Tensor]) -> Tensor:
    """The packed bytes of each row, concatenated over parameters."""
    return torch.cat([pack(part) for part in parameters], dim=1)


def _by_parameter(packed: Tensor, widths: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """The packed bytes of each parameter, and its width."""
    return zip(torch.split(packed, [integer_bytes(width) for width in widths], dim=1), widths, strict=True)


class GatherFormat:
    """Format of the gathers of one group. If integers are sent, each rank contributes bytes, parameter by parameter.

    All ranks dequantise the same bytes, including their own shares, so that they compute with the same numbers. The master is
    not changed and is rounded anew for each gather [Wang et al. 2023, ZeRO++, 3.1: qwZ]. Shares start at block boundaries
    (`share_block` of `make_layout`), so the numbers depend neither on the ranks nor on what is gathered together.
    """

    def __init__(self, config: TrialConfig, group: ProcessGroup) -> None:
        # A single rank sends nothing.
        self.integers = config.gather_dtype == INT8 and group.size > 1

    def packs(self, slot: Slot) -> bool:
        """Whether gathers of this parameter's dtype are packed as bytes; quantised parameters already are bytes."""
        return self.integers and slot.parameter.is_floating_point()

    def width(self, slot: Slot) -> int:
        """Elements of this parameter in a gather's row."""
        if not self.packs(slot):
            return slot.shard_elements
        return integer_bytes(slot.shard_elements) if _is_large(slot) else slot.shard_elements * slot.parameter.element_size()

    def packed(self, values: Tensor, slots: Sequence[Slot]) -> Tensor:
        """The bytes of this rank's shares of `slots`, whose values are concatenated."""
        shares = torch.split(values, [slot.shard_elements for slot in slots])
        return torch.cat([
            pack(share[None]).view(-1) if _is_large(slot) else share.view(torch.uint8)
            for slot, share in zip(slots, shares, strict=True)
        ])  # fmt: skip

    def unpacked(self, rows: Tensor, slots: Sequence[Slot]) -> Iterator[tuple[Slot, Tensor]]:
        """The flat parameters in the rows of a gather of packed bytes."""
        column = 0
        for slot in slots:
            width = self.width(slot)
            yield slot, from_rows(self._shares(rows[:, column : column + width], slot), slot)
            column += width

    def _shares(self, rows: Tensor, slot: Slot) -> Tensor:
        dtype = slot.parameter.dtype
        if _is_large(slot):
            return unpack(rows, slot.shard_elements, dtype)
        # Copy, since the view needs aligned bytes.
        return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def _is_large(slot: Slot) -> bool:
    return slot.elements >= LEAST_QUANTISED
