"""Muon: momentum of which, for each matrix of the blocks, the orthogonal part is the step."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from executor.engines.native.collectives import InFlight, mark
from executor.engines.native.layout import Slot, from_rows
from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer, RestAdamW, Shares, share_of
from executor.engines.native.optimizers.newton_schulz import orthogonalized
from search_spaces.optimizers import MUON_MOMENTUM

ADAMW_LENGTH = 0.2
"""Root mean square of an element of AdamW's step, as a share of its learning rate: matrices step as far, so that the job's one
learning rate and weight decay hold for both [Liu et al. 2025, Muon is Scalable for LLM Training, 2.2]."""


@dataclass(slots=True)
class _Gather:
    """A matrix on its way to every rank that shares it."""

    work: InFlight
    slot: Slot
    rows: Tensor


class Muon(DeviceOptimizer):
    """`torch.optim.Muon` with the learning rate of AdamW (`match_rms_adamw`) for the blocks' matrices, AdamW for the rest.

    A matrix is needed whole, and ZeRO cuts every one. So a rank's share of the momentum's look ahead is gathered in bf16, the
    type in which it is made orthogonal; each rank does that itself and takes its share of the result: P elements more are
    gathered a step, and nothing is sent back [Liu et al. 2025, 2.3, algorithm 1]. Slices of tensor ranks are gathered in turn.
    The next matrix is on its way meanwhile.
    """

    def __init__(self, master: Tensor, shares: Shares, hyperparameters: Hyperparameters, overlap: bool) -> None:
        super().__init__(master, shares.layout)
        self._shares, self._hyperparameters = shares, hyperparameters
        self._ahead = 1 if overlap else 0
        self._matrices = [slot for slot in self.layout.slots if slot.name in shares.matrices]
        rest = [slot for slot in self.layout.slots if slot.name not in shares.matrices]
        elements = [slot.shard_elements for slot in self._matrices]
        self._momentum = torch.zeros(sum(elements), dtype=master.dtype, device=master.device)
        self._buffers = dict(zip(self._matrices, torch.split(self._momentum, elements), strict=True))
        self._rest = RestAdamW({slot: self._weights(slot) for slot in rest}, hyperparameters)

    def settled(self) -> bool:
        return self._rest.settled()

    def _update(self, gradient: Sequence[Tensor]) -> None:
        self._rest.step(gradient)
        on_the_way: deque[_Gather] = deque()
        for slot in self._matrices:
            on_the_way.append(self._send(slot, share_of(gradient, slot)))
            while len(on_the_way) > self._ahead:
                self._land(on_the_way.popleft())
        while on_the_way:
            self._land(on_the_way.popleft())

    def _send(self, slot: Slot, gradient: Tensor) -> _Gather:
        """Look ahead along the momentum [Nesterov], and gather that."""
        momentum = self._buffers[slot].lerp_(gradient, 1 - MUON_MOMENTUM)
        ahead = gradient.lerp_(momentum, MUON_MOMENTUM).bfloat16()
        rows = torch.empty(self.layout.ranks, slot.shard_elements, dtype=ahead.dtype, device=ahead.device)
        mark("buffers", rows)
        if self.layout.ranks > 1:
            return _Gather(self._shares.group.all_gather(rows, ahead), slot, rows)
        rows[0].copy_(ahead)
        return _Gather(InFlight(lambda: None), slot, rows)

    def _land(self, gather: _Gather) -> None:
        gather.work.wait()
        slot, rate = gather.slot, self._hyperparameters.learning_rate
        slices = self._slices(slot, from_rows(gather.rows, slot).view(slot.shape))
        whole = orthogonalized(torch.cat(slices, dim=self._shares.split[slot.name]) if len(slices) > 1 else slices[0])
        length = ADAMW_LENGTH * math.sqrt(max(whole.shape))
        weights = self._weights(slot).mul_(1 - rate * self._hyperparameters.weight_decay)
        weights.add_(self._own(slot, whole, len(slices)), alpha=-rate * length)

    def _slices(self, slot: Slot, own: Tensor) -> tuple[Tensor, ...]:
        """The slices of every tensor-parallel rank."""
        tensor = self._shares.tensor
        if slot.name not in self._shares.split or tensor.size == 1:
            return (own,)
        rows = torch.empty(tensor.size, own.numel(), dtype=own.dtype, device=own.device)
        mark("buffers", rows)
        tensor.all_gather(rows, own.reshape(-1)).wait()
        return rows.view(tensor.size, *own.shape).unbind()

    def _own(self, slot: Slot, whole: Tensor, slices: int) -> Tensor:
        """This rank's share of its slice, padded as its weights are."""
        mine = whole.chunk(slices, dim=self._shares.split[slot.name])[self._shares.tensor.rank] if slices > 1 else whole
        start = self._shares.own_row * slot.shard_elements
        share = mine.reshape(-1)[start : start + slot.shard_elements]
        return functional.pad(share, (0, slot.shard_elements - share.numel()))

    def _states(self) -> Iterator[Tensor]:
        yield self._momentum
        yield from self._rest.states()
