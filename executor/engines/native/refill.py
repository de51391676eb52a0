"""Stages 1 and 2: updated parameters on their way back to every rank, at the end of a step or beside the next forward."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from executor.engines.native.buckets import IN_FLIGHT
from executor.engines.native.layout import Slot, cut, from_rows, ranges
from executor.engines.native.parameter_shard import ParameterShard
from executor.engines.native.prefetch import Unit
from executor.parallel.collectives import Group, InFlight, mark
from search_spaces.trial_config import TrialConfig

Bucket = tuple[Slot, ...]
"""What one all-gather carries, in the order of the offsets."""


@dataclass(slots=True)
class _Sent:
    """A bucket on its way: its tensors must live until the gather has ended."""

    work: InFlight
    bucket: Bucket
    rows: Tensor
    shard: Tensor


class Refill:
    """All-gathers of `allgather_bucket_size` elements, one after the other: the next is sent while the last one is copied,
    where communication overlaps.
    """

    spans_steps: ClassVar[bool] = False
    """Whether what an update has changed is gathered in the step after it."""

    def __init__(self, slots: Sequence[Slot], group: Group, config: TrialConfig) -> None:
        self.group, self.limit = group, IN_FLIGHT if config.overlap_comm else 1
        self.buckets: tuple[Bucket, ...] = tuple(cut(slots, lambda slot: slot.elements, config.allgather_bucket_size))
        self._shard: ParameterShard | None = None
        self._waiting: deque[Bucket] = deque()
        self._sent: deque[_Sent] = deque()

    def update(self, shard: ParameterShard) -> None:
        """Bring every parameter up to date: the optimizer has changed all; `shard` holds this rank's share of them."""
        self._wait_for(shard)
        self._send()
        while self._sent:
            self._land()
        self._shard = None

    def begin_step(self) -> None:
        """A step begins."""

    def close(self) -> None:
        """Forget what was not sent."""
        self._waiting.clear()
        self._shard = None

    def _wait_for(self, shard: ParameterShard) -> None:
        self._shard, self._waiting = shard, deque(self.buckets)

    @torch.no_grad()
    def _send(self) -> None:
        while self._waiting and len(self._sent) < self.limit:
            assert self._shard is not None
            bucket = self._waiting.popleft()
            shard = self._shard.read(ranges(bucket)).values
            rows = torch.empty(self.group.size, shard.numel(), dtype=shard.dtype, device=shard.device)
            mark("buffers", rows)
            self._sent.append(_Sent(self.group.all_gather(rows, shard), bucket, rows, shard))

    @torch.no_grad()
    def _land(self) -> Bucket:
        """Copy the oldest to where it belongs, with the next one on its way."""
        sent = self._sent.popleft()
        sent.work.wait()
        bucket = sent.bucket
        fill(bucket, sent.rows)
        del sent  # its memory is free before the next bucket's is taken
        self._send()
        return bucket


class RefillBesideForward(Refill):
    """The same beside the next step's first forward (`overlap_param_gather`) [Narayanan et al., Megatron-LM].

    1. The update sends nothing. The step that follows begins with the first gathers.
    2. A unit's parameters are waited for right before it runs, and the next gathers are sent, in the order of forward:
       `IN_FLIGHT` are on the way at once (one, where communication does not overlap). A gather carries parameters of one unit
       alone: who waits for it needs it.
    3. Whoever runs the module between steps finds them in the same way. The master is always up to date.

    Between two steps nothing is on its way. The order of gathers is that of forward, the same on every rank.
    """

    spans_steps = True

    def __init__(self, units: Sequence[Unit], group: Group, config: TrialConfig) -> None:
        super().__init__((), group, config)
        self.buckets = tuple(_buckets(units, config.allgather_bucket_size))
        self._stale: set[Slot] = set()
        self._hooks = [unit.module.register_forward_pre_hook(self._before(unit)) for unit in units]

    def update(self, shard: ParameterShard) -> None:
        """Send nothing yet: parameters are stale until their unit runs."""
        self._wait_for(shard)
        self._stale.update(slot for bucket in self.buckets for slot in bucket)

    def begin_step(self) -> None:
        """Send the first gathers: in a pipeline, while other stages still work."""
        self._send()

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before(self, unit: Unit) -> Callable[..., None]:
        def wait(*_: object) -> None:
            while self._stale and any(slot in self._stale for slot in unit.slots):
                self._send()
                self._stale.difference_update(self._land())

        return wait


def fill(slots: Sequence[Slot], rows: Tensor) -> None:
    """Copy gathered rows [ranks, shares of `slots` side by side] to the parameters: one operation for all without padding."""
    ranks = len(rows)
    fits = [slot.shard_elements * ranks == slot.elements and slot.parameter.dtype == rows.dtype for slot in slots]
    widths = [slot.shard_elements for slot in slots]
    places = [
        slot.parameter.data.view(ranks, width) if whole else rows.new_empty(ranks, width)
        for slot, width, whole in zip(slots, widths, fits, strict=True)
    ]
    torch.split_with_sizes_copy(rows, widths, dim=1, out=places)
    beside = [(slot, place) for slot, place, whole in zip(slots, places, fits, strict=True) if not whole]
    if beside:
        targets = [slot.parameter.data.view(-1) for slot, _ in beside]
        torch._foreach_copy_(targets, [from_rows(place, slot) for slot, place in beside])


def _buckets(units: Sequence[Unit], limit: int) -> Iterator[Bucket]:
    """Of each unit in turn what no unit before it has, in gathers of at most `limit` elements."""
    met: set[Slot] = set()
    for unit in units:
        own = sorted((slot for slot in unit.slots if slot not in met), key=lambda slot: slot.offset)
        met.update(own)
        yield from cut(own, lambda slot: slot.elements, limit)
