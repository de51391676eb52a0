"""Stages 1 and 2: all-gathers updated parameters, at the end of a step or during the next forward."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from executor.engines.native.parameter_shard import ParameterShard, Slot, fill, ranges
from executor.engines.native.prefetch import GatherUnit
from executor.parallel.collectives import InFlight, ProcessGroup, mark
from search_spaces.communication import IN_FLIGHT, cut
from search_spaces.trial_config import TrialConfig

Bucket = tuple[Slot, ...]
"""The slots of one all-gather, in the order of their offsets."""


@dataclass(slots=True)
class _RefillInFlight:
    """A bucket in flight; its tensors must live until the gather has ended."""

    work: InFlight
    bucket: Bucket
    rows: Tensor
    shard: Tensor


class Refill:
    """All-gathers of `allgather_bucket_size` elements, one after the other. If communication overlaps, the next one is sent
    while the last one is copied.
    """

    spans_steps: ClassVar[bool] = False
    """Whether updated parameters are gathered in the next step."""

    def __init__(self, slots: Sequence[Slot], group: ProcessGroup, config: TrialConfig) -> None:
        self.group, self.limit = group, IN_FLIGHT if config.overlap_comm else 1
        self.buckets: tuple[Bucket, ...] = tuple(cut(slots, lambda slot: slot.elements, config.allgather_bucket_size))
        self._shard: ParameterShard | None = None
        self._waiting: deque[Bucket] = deque()
        self._sent: deque[_RefillInFlight] = deque()

    def update(self, shard: ParameterShard) -> None:
        """Bring every parameter up to date after an update; `shard` holds this rank's share of them."""
        self._enqueue(shard)
        self._send()
        while self._sent:
            self._land()
        self._shard = None

    def begin_step(self) -> None:
        """Called at the begin of a step."""

    def close(self) -> None:
        """Drop the buckets that were not sent."""
        self._waiting.clear()
        self._shard = None

    def _enqueue(self, shard: ParameterShard) -> None:
        self._shard, self._waiting = shard, deque(self.buckets)

    @torch.no_grad()
    def _send(self) -> None:
        while self._waiting and len(self._sent) < self.limit:
            assert self._shard is not None
            bucket = self._waiting.popleft()
            shard = self._shard.read(ranges(bucket)).values
            rows = torch.empty(self.group.size, shard.numel(), dtype=shard.dtype, device=shard.device)
            mark("buffers", rows)
            self._sent.append(_RefillInFlight(self.group.all_gather(rows, shard), bucket, rows, shard))

    @torch.no_grad()
    def _land(self) -> Bucket:
        """Copy the oldest bucket in flight to the parameters, and send the next one."""
        sent = self._sent.popleft()
        sent.work.wait()
        bucket = sent.bucket
        fill(bucket, sent.rows)
        del sent  # frees its memory before the next bucket is allocated
        self._send()
        return bucket


class RefillBesideForward(Refill):
    """Gathers during the next step's first forward (`overlap_param_gather`) [Narayanan et al., Megatron-LM].

    1. The update sends nothing. The next step begins with the first gathers.
    2. Right before a unit runs, it waits for its parameters and sends the next gathers, in the order of forward. `IN_FLIGHT`
       gathers are in flight at once (one if communication does not overlap). A gather contains parameters of only one unit, so
       that a unit waits only for gathers that it needs.
    3. A forward between steps gathers them in the same way. The master is always up to date.

    Between two steps nothing is in flight. The order of gathers is that of forward, the same on every rank.
    """

    spans_steps = True

    def __init__(self, units: Sequence[GatherUnit], group: ProcessGroup, config: TrialConfig) -> None:
        super().__init__((), group, config)
        self.buckets = tuple(_buckets(units, config.allgather_bucket_size))
        self._stale: set[Slot] = set()
        self._hooks = [unit.module.register_forward_pre_hook(self._before(unit)) for unit in units]

    def update(self, shard: ParameterShard) -> None:
        """Mark all parameters as stale until their unit runs; send nothing yet."""
        self._enqueue(shard)
        self._stale.update(slot for bucket in self.buckets for slot in bucket)

    def begin_step(self) -> None:
        """Send the first gathers; in a pipeline this overlaps with the work of other stages."""
        self._send()

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before(self, unit: GatherUnit) -> Callable[..., None]:
        def wait(*_: object) -> None:
            while self._stale and any(slot in self._stale for slot in unit.slots):
                self._send()
                self._stale.difference_update(self._land())

        return wait


def _buckets(units: Sequence[GatherUnit], limit: int) -> Iterator[Bucket]:
    """Buckets of at most `limit` elements; each unit's contain its slots that no earlier unit has."""
    covered: set[Slot] = set()
    for unit in units:
        unit_slots = sorted((slot for slot in unit.slots if slot not in covered), key=lambda slot: slot.offset)
        covered.update(unit_slots)
        yield from cut(unit_slots, lambda slot: slot.elements, limit)
