"""A second copy of the sharded parameters within a small group of nearby ranks, from which later gathers read."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from executor.engines.native.layout import Slot
from executor.parallel.collectives import Group, mark


class NearCopies:
    """Shards the result of a gather over all ranks over a group of nearby ranks [Wang et al. 2023, ZeRO++, 3.2: hpZ].

    Of the gathered rows of each parameter, rank k of the s ranks in the group keeps the k-th of s equal parts. Concatenated,
    the parts are bitwise equal to the rows, in whatever format they were sent. They are valid from the first gather after an
    update to the next update, and permanently for frozen parameters.
    """

    def __init__(self, group: Group, ranks: int) -> None:
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
