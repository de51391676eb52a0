"""A second copy of the sharded parameters among few neighbouring ranks, which gathers need not leave."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from executor.engines.native.layout import Slot
from executor.parallel.collectives import Group, mark


class NearCopies:
    """What a gather over all ranks has brought, shared out over a group of neighbours [Wang et al. 2023, ZeRO++, 3.2: hpZ].

    A rank keeps, of the rows that a gather has of each parameter, as many as make its part: the k-th of s neighbours the
    k-th s-th of them. Neighbours' parts in their order are the rows again, to the bit, in whatever format they were sent. They
    are there from the first gather after an update to the next update, those of frozen parameters for good.
    """

    def __init__(self, group: Group, ranks: int) -> None:
        """`ranks`: among which parameters are sharded, a multiple of the group's."""
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
        """This rank's rows of `slots`, those of each rank of a gather side by side, one after the other."""
        joined = torch.cat([self._kept[slot] for slot in slots], dim=1).view(-1)
        mark("buffers", joined)
        return joined

    def parameters_changed(self) -> None:
        """What is trained is stale."""
        self._current = {slot for slot in self._current if not slot.parameter.requires_grad}

    def tensors(self) -> Iterator[Tensor]:
        """What it keeps."""
        yield from self._kept.values()
