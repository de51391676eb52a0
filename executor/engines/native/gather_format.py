"""Format of gathered parameters: shares as they are, or large ones quantised to blocks of 8-bit integers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from executor.engines.native.layout import Slot, from_rows
from executor.parallel.block_integers import pack, unpack
from executor.parallel.collectives import Group
from search_spaces.compression import INT8, integer_bytes
from search_spaces.optimizers import LEAST_QUANTISED
from search_spaces.trial_config import TrialConfig


class GatherFormat:
    """Format of the gathers of one group. If integers are sent, each rank contributes bytes, parameter by parameter.

    All ranks dequantise the same bytes, including their own shares, so that they compute with the same numbers. The master is
    not changed and is rounded anew for each gather [Wang et al. 2023, ZeRO++, 3.1: qwZ]. Shares start at block boundaries
    (`share_block` of `make_layout`), so the numbers depend neither on the ranks nor on what is gathered together.
    """

    def __init__(self, config: TrialConfig, group: Group) -> None:
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
        """The flat parameters in the rows of a gather."""
        column = 0
        for slot in slots:
            width = self.width(slot)
            yield slot, from_rows(self._shares(rows[:, column : column + width], slot), slot)
            column += width

    def _shares(self, rows: Tensor, slot: Slot) -> Tensor:
        dtype = slot.parameter.dtype
        if not self.packs(slot):
            return rows
        if _is_large(slot):
            return unpack(rows, slot.shard_elements, dtype)
        # Copy, since the view needs aligned bytes.
        return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def _is_large(slot: Slot) -> bool:
    return slot.elements >= LEAST_QUANTISED
