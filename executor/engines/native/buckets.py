"""Gradient reduction of ZeRO 0-3 into flat shards, through fixed buckets."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from executor.engines.capabilities import splits_backward
from executor.engines.native.parameter_shard import BucketLayout, Slot, as_rows
from executor.engines.native.quantised_communication import QuantisedAllReduce, QuantisedReduceScatter
from executor.parallel.collectives import InFlight, ProcessGroup, mark, shares_memory
from executor.parallel.summed_products import add_product, can_add
from search_spaces.communication import IN_FLIGHT, INT8, PIECE_ELEMENTS, cut
from search_spaces.trial_config import TrialConfig

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes in which gradients may be sent or summed, besides the master's, which `fp32` stands for."""


@dataclass(slots=True)
class _BucketPiece:
    """Adjacent slots of a bucket whose gradients are moved into it together."""

    slots: tuple[Slot, ...]
    waiting: set[Slot] = field(default_factory=set)
    """Slots whose gradients are in `parameter.grad`."""


@dataclass(slots=True)
class _BucketInFlight:
    """A bucket in flight: its tensors must live until the collective has ended."""

    work: InFlight | QuantisedReduceScatter | QuantisedAllReduce
    bucket: int
    rows: Tensor | None
    output: Tensor | None
    """None: `work.wait()` returns the output."""
    first: bool
    """Whether it is the bucket's first reduction in this step; later ones are added to it."""
    last: bool
    """Whether it is the bucket's last reduction in this step."""


class GradientReducer:
    """Reduces the gradients of a step to this rank's share of their sum.

    1. Ready gradients are moved from `parameter.grad` into their bucket: a matrix [ranks, columns] whose row r belongs to rank
       r. Adjacent gradients are collected until there are up to `PIECE_ELEMENTS`, which one operation moves.
       (`contiguous_gradients` off: gradients stay in place until the whole bucket is ready, and the bucket is assembled then.
       Autograd accumulates into them if their dtype is the accumulation dtype.)
       If the matrix has one row (stage 0, or one data rank), a weight's part of it has the weight's shape, and products add to
       it directly (`add_product`) [Megatron-LM, gradient_accumulation_fusion]. With several rows it is strided: each rank's row
       has a part of the weight, which no product writes.
    2. When all parameters of a bucket are declared ready and all earlier buckets are sent, it is reduced: all-reduce at
       stage 0, reduce-scatter above. The order is the layout's on every rank. At the end of a micro-batch the remaining
       buckets are sent, with zeros for parameters that had no gradient on this rank.
       With `reduce_dtype=int8` it is quantised, sent by all-to-all and summed by the receiver; at stage 0 the partial sums are
       then gathered, and so are sums over copies of the shards.
    3. Received sums are added to the flat gradient shard. After its last reduction in a step, a bucket's share is cast to the
       master's dtype and summed over the copies of the shards (HSDP), while other buckets are still in flight.

    Stages 0 and 1, and stage 2 with `defer_gradient_reduction`, sum full gradients over the micro-batches of a step and reduce
    at the last one; stages 2 and 3 reduce at every micro-batch and sum their shares [Rajbhandari et al. 2020, ZeRO, 5.2]. Both
    sum in `accumulation_dtype`, whatever dtype is sent. Losses are scaled before backward, so the sums are means.
    """

    def __init__(
        self,
        layout: BucketLayout,
        group: ProcessGroup,
        replicas: ProcessGroup,
        config: TrialConfig,
        master_dtype: torch.dtype,
        device: torch.device,
        accumulates: bool = True,
        weights: Collection[Slot] = (),
    ) -> None:
        """`accumulates`: a step may have several micro-batches. `weights`: those whose products can add to sums."""
        self.layout, self.group, self.replicas, self.device = layout, group, replicas, device
        # In a pipeline another micro-batch's work follows at once, so reductions may overlap with it.
        self.waits_per_micro_batch = config.pipeline_parallel_size == 1
        self.master_dtype = master_dtype
        self.reduce_dtype = NARROW.get(config.reduce_dtype, master_dtype)
        self.integers = config.reduce_dtype == INT8
        self.skips_reduction = False
        """Whether gradients are not reduced here, because the optimizer itself sums over ranks."""
        self.sum_dtype = NARROW.get(config.accumulation_dtype, master_dtype)
        self.contiguous = config.contiguous_gradients
        self.overwritten = config.cuda_graphs
        """Whether the next backward overwrites this micro-batch's gradients (graph replay), so that kept ones are copied."""
        self.limit = IN_FLIGHT if config.overlap_comm else 0
        reduced = config.zero_stage == 3 or (config.zero_stage == 2 and not config.defer_gradient_reduction)
        self.every_micro_batch = reduced and layout.ranks > 1
        self._shares: dict[int, Tensor] = {}
        # Not if each micro-batch is reduced: the next one would overwrite the sum so far.
        in_place = layout.ranks == 1 and not self.every_micro_batch
        self.rows_dtype = self.sum_dtype if accumulates and not self.every_micro_batch else self.reduce_dtype
        """Dtype of full gradients: the accumulation dtype only if they are summed over micro-batches before they are sent."""
        self._in_share = in_place and self.reduce_dtype == self.rows_dtype == master_dtype
        # A replayed graph does not call into buckets; a backward of two parts would add every product twice.
        adds = in_place and self.contiguous and not self.overwritten and not splits_backward(config)
        self.summed = frozenset(slot for slot in weights if adds and can_add(device, slot.parameter.dtype, self.rows_dtype))
        """Slots to whose sums products add the gradients themselves."""
        self._rows: dict[int, Tensor] = {}
        self._held: dict[Slot, Tensor] = {}
        # At most the size of the largest parameter, whose gradient must wait in any case, so waiting needs no extra memory.
        most = min(PIECE_ELEMENTS, max((slot.elements for slot in layout.slots), default=0))
        self._pieces = [
            [
                _BucketPiece(slots)
                for _, adjacent in groupby(bucket, self.summed.__contains__)
                for slots in cut([*adjacent], lambda slot: slot.elements, most)
            ]
            for bucket in layout.buckets
        ]
        self._piece_of = {slot: piece for pieces in self._pieces for piece in pieces for slot in piece.slots}
        self._ready: set[Slot] = set()
        self._missing: list[int] = []
        """Number of parameters of each bucket that are not yet declared ready in this micro-batch."""
        self._filled: set[Slot] = set()
        self._begun: set[int] = set()
        self._sent: deque[_BucketInFlight] = deque()
        self._next = 0
        self._reduces = self._last = True
        self._gathering: deque[QuantisedAllReduce] = deque()
        """Stage 0: quantised sums whose parts are being gathered from the other ranks."""
        self._last_sums: list[InFlight | QuantisedAllReduce] = []
        """In-place sums of finished shares over the copies of the shards."""

    def begin_micro_batch(self, last: bool) -> None:
        """Start a micro-batch. All but the last only accumulate, unless the stage reduces every micro-batch."""
        self._last = last
        self._reduces = last or self.every_micro_batch
        self._next = 0
        self._ready.clear()
        self._missing = [len(bucket) for bucket in self.layout.buckets]

    @torch.no_grad()
    def declare_ready(self, slots: Iterable[Slot]) -> None:
        """Declare that these parameters get no more gradient in this micro-batch; send the buckets that this completes.

        If other collectives run during backward (stage 3), every rank must call it at the same point between them, whether or
        not the rank has these gradients.
        """
        for slot in slots:
            if slot not in self._ready:
                self._ready.add(slot)
                self._missing[slot.bucket] -= 1
        while self._reduces and self._next < len(self.layout.buckets) and not self._missing[self._next]:
            self._send_next()

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Send the remaining buckets; outside a pipeline, wait for all reductions in flight."""
        for bucket in range(self._next, len(self.layout.buckets)):
            self._collect_rest(bucket)
        while self._reduces and self._next < len(self.layout.buckets):
            self._send_next()
        if self.waits_per_micro_batch:
            self._land_all()

    @torch.no_grad()
    def take_shares(self) -> list[Tensor]:
        """This rank's share of the mean gradient, in the master's dtype, one flat tensor per bucket; the reducer drops it."""
        self._land_all()
        while self._gathering:
            self._gathering.popleft().wait()
        for work in self._last_sums:
            if isinstance(work, QuantisedAllReduce):
                work.gather()
        for work in self._last_sums:
            work.wait()
        self._last_sums.clear()
        shares = [self._share(bucket) for bucket in range(len(self.layout.buckets))]
        self._shares.clear()
        self._begun.clear()
        return shares

    def held_tensors(self) -> list[Tensor]:
        """Gradients that live between micro-batches or steps."""
        stay = [slot.parameter.grad for slot in self._filled if slot.parameter.grad is not None]
        return [*self._shares.values(), *self._rows.values(), *self._held.values(), *stay]

    def _land_all(self) -> None:
        while self._sent:
            self._land(self._sent.popleft())

    @torch.no_grad()
    def take(self, slot: Slot) -> None:
        """Take this micro-batch's gradient from `parameter.grad`. Called once per parameter and micro-batch."""
        gradient = slot.parameter.grad
        if gradient is None:
            return
        if self.contiguous:
            piece = self._piece_of[slot]
            piece.waiting.add(slot)
            if len(piece.waiting) == len(piece.slots):
                self._collect(piece)
            return
        if slot in self._held:
            self._held[slot].add_(gradient)
            slot.parameter.grad = None
        elif not self._reduces and (gradient.dtype != self.rows_dtype or self.overwritten):
            self._held[slot] = gradient.to(self.rows_dtype, copy=self.overwritten)
            mark("gradients", self._held[slot])
            slot.parameter.grad = None
        self._filled.add(slot)

    @torch.no_grad()
    def add_product(self, slot: Slot, gradient: Tensor, x: Tensor) -> None:
        """Add a micro-batch's gradient of a weight: the product of the transpose of `gradient` [rows, outputs] and `x` [rows,
        inputs]."""
        total = self._bucket_rows(slot.bucket)[0, slot.column : slot.column + slot.elements].view(slot.shape)
        add_product(total, gradient, x, first=slot not in self._filled)
        self._filled.add(slot)

    def _collect(self, piece: _BucketPiece) -> None:
        """Move the waiting gradients of a piece into the bucket, in one operation if none is missing."""
        waiting = [slot for slot in piece.slots if slot in piece.waiting]
        gradients = {slot: slot.parameter.grad for slot in waiting if slot.parameter.grad is not None}
        filled = self._filled.intersection(waiting)
        together = len(waiting) == len(piece.slots) and len(filled) in (0, len(waiting))
        for slots in (piece.slots,) if together else tuple((slot,) for slot in waiting):
            self._put(slots, [gradients[slot] for slot in slots], adds=slots[0] in filled)
        for slot in waiting:
            slot.parameter.grad = None
        self._filled.update(waiting)
        piece.waiting.clear()

    def _collect_rest(self, bucket: int) -> None:
        """Collect the pieces in which a parameter had no gradient."""
        for piece in self._pieces[bucket]:
            if piece.waiting:
                self._collect(piece)

    def _put(self, slots: Sequence[Slot], gradients: Sequence[Tensor], adds: bool) -> None:
        """Copy or add the gradients of adjacent slots to their bucket. This takes one operation, or two if they must first be
        concatenated because they are added or the target is not contiguous.
        """
        ranks, first, last = self.layout.ranks, slots[0], slots[-1]
        target = self._bucket_rows(first.bucket)[:, first.column : last.column + last.shard_elements]
        dtype = gradients[0].dtype
        if len(slots) == 1:
            rows = as_rows(gradients[0], first, ranks)
        elif any(gradient.dtype != dtype for gradient in gradients):
            for slot, gradient in zip(slots, gradients, strict=True):
                self._put((slot,), (gradient,), adds)
            return
        elif ranks == 1 and (not adds or dtype == target.dtype):
            targets = torch.split(target[0], [slot.shard_elements for slot in slots])
            move = torch._foreach_add_ if adds else torch._foreach_copy_
            move(targets, [gradient.reshape(-1) for gradient in gradients])
            return
        else:
            parts = [_flat(gradient, slot, ranks) for slot, gradient in zip(slots, gradients, strict=True)]
            # `_chunk_cat` casts between these two dtypes on every device.
            casts = dtype == target.dtype or (dtype, target.dtype) == (torch.bfloat16, torch.float32)
            direct = not adds and target.is_contiguous() and casts
            rows = target if direct else torch.empty(target.shape, dtype=dtype, device=target.device)
            torch._chunk_cat(parts, dim=0, num_chunks=ranks, out=rows)
            if direct:
                return
            mark("buffers", rows)
        target.add_(rows) if adds else target.copy_(rows)

    def _bucket_rows(self, bucket: int) -> Tensor:
        """The bucket's matrix; at stage 0 the share itself, so that no copy back is needed."""
        if bucket not in self._rows:
            columns, ranks = self.layout.columns(bucket), self.layout.ranks
            if self._in_share:
                self._rows[bucket] = self._share(bucket).view(1, columns)
            else:
                self._rows[bucket] = torch.empty(ranks, columns, dtype=self.rows_dtype, device=self.device)
                mark("gradients" if not self.every_micro_batch else "buffers", self._rows[bucket])
        return self._rows[bucket]

    def _share(self, bucket: int) -> Tensor:
        """This rank's share of a bucket's gradient; allocated when the bucket is reduced, when fewer activations are live."""
        if bucket not in self._shares:
            dtype = self._share_dtype(bucket)
            self._shares[bucket] = torch.empty(self.layout.columns(bucket), dtype=dtype, device=self.device)
            mark("gradients", self._shares[bucket])
        return self._shares[bucket]

    def _share_dtype(self, bucket: int) -> torch.dtype:
        """Dtype of the existing share, or of one created now: the accumulation dtype if more sums will be added to it."""
        if bucket in self._shares:
            return self._shares[bucket].dtype
        return self.master_dtype if self._last or not self.every_micro_batch else self.sum_dtype

    def _finish_share(self, bucket: int) -> Tensor:
        """The share in the master's dtype, after the last sum was added to it."""
        share = self._share(bucket)
        if share.dtype != self.master_dtype:
            self._shares[bucket] = share.to(self.master_dtype)
            mark("gradients", self._shares[bucket])
        return self._shares[bucket]

    def _send_next(self) -> None:
        bucket, self._next = self._next, self._next + 1
        first = bucket not in self._begun
        self._begun.add(bucket)
        rows = self._assemble(bucket)
        if rows.dtype != self.reduce_dtype:
            rows = rows.to(self.reduce_dtype)
            becomes_share = self.layout.ranks == 1 and self.reduce_dtype == self.master_dtype
            mark("gradients" if becomes_share else "buffers", rows)
            if becomes_share:
                self._shares[bucket] = rows.view(-1)
        work, output = self._reduce(bucket, rows, first)
        self._sent.append(_BucketInFlight(work, bucket, rows if output is not None else None, output, first, self._last))
        while len(self._sent) > self.limit:
            self._land(self._sent.popleft())

    def _reduce(
        self, bucket: int, rows: Tensor, first: bool
    ) -> tuple[InFlight | QuantisedReduceScatter | QuantisedAllReduce, Tensor | None]:
        """Start the sum over ranks; return it and its output."""
        if self.layout.ranks == 1:
            whole = rows.view(-1)
            if self.integers and self.group.size > 1 and not self.skips_reduction:
                return QuantisedAllReduce(self.group, whole, self._widths(bucket)), whole
            return InFlight(lambda: None) if self.skips_reduction else self.group.all_reduce(rows), whole
        if self.integers:
            widths = self._widths(bucket)
            return QuantisedReduceScatter(self.group, torch.split(rows, widths, dim=1), widths, rows.dtype), None
        output = self._reduce_output(bucket, rows, first)
        return self.group.reduce_scatter(output, rows), output

    def _assemble(self, bucket: int) -> Tensor:
        """The bucket's matrix, with zeros for parameters without a gradient on this rank."""
        slots = self.layout.buckets[bucket]
        self._collect_rest(bucket)
        if not self.contiguous:
            self._put_held([slot for slot in slots if slot in self._filled], together=self._filled.issuperset(slots))
        rows = self._bucket_rows(bucket)
        for slot in slots:
            if slot not in self._filled:
                rows[:, slot.column : slot.column + slot.shard_elements].zero_()
        self._filled.difference_update(slots)
        del self._rows[bucket]
        return rows

    def _put_held(self, slots: Sequence[Slot], together: bool) -> None:
        """Put gradients that stayed in place into the bucket; `together`: none is missing."""
        kept_gradients = [self._held.pop(slot) if slot in self._held else slot.parameter.grad for slot in slots]
        gradients = [gradient for gradient in kept_gradients if gradient is not None]
        if together:
            self._put(slots, gradients, adds=False)
        else:
            for slot, gradient in zip(slots, gradients, strict=True):
                self._put((slot,), (gradient,), adds=False)
        for slot in slots:
            slot.parameter.grad = None

    def _reduce_output(self, bucket: int, rows: Tensor, first: bool) -> Tensor:
        """Output of a reduce-scatter: the share itself if the dtypes match. A later reduction first adds the share to this
        rank's row."""
        if self.reduce_dtype == self._share_dtype(bucket):
            share = self._share(bucket)
            if not first:
                # Wait for the reductions of this bucket in flight.
                while any(sent.bucket == bucket for sent in self._sent):
                    self._land(self._sent.popleft())
                rows[self.group.rank].add_(share)
            return share
        output = torch.empty(rows.shape[1], dtype=self.reduce_dtype, device=self.device)
        mark("buffers", output)
        return output

    def _land(self, sent: _BucketInFlight) -> None:
        if isinstance(sent.work, QuantisedAllReduce) and sent.output is not None:
            self._land_parts(sent.work, sent.bucket, sent.output)
            return
        landed = sent.work.wait()
        output = landed if sent.output is None else sent.output
        assert output is not None
        share = self._share(sent.bucket)
        if not shares_memory(output, share):
            share.copy_(output) if sent.first else share.add_(output)
        if sent.last:
            share = self._finish_share(sent.bucket)
            if self.replicas.size > 1 and self.integers:
                self._last_sums.append(QuantisedAllReduce(self.replicas, share, self._widths(sent.bucket)))
            elif self.replicas.size > 1:
                self._last_sums.append(self.replicas.all_reduce(share))

    def _widths(self, bucket: int) -> list[int]:
        return [slot.shard_elements for slot in self.layout.buckets[bucket]]

    def _land_parts(self, work: QuantisedAllReduce, bucket: int, whole: Tensor) -> None:
        """Stage 0, which reduces once per step: gather the ranks' partial sums in the share itself."""
        work.gather()
        if bucket not in self._shares:
            self._shares[bucket] = whole
            mark("gradients", whole)
        self._gathering.append(work)
        while len(self._gathering) > self.limit:
            self._gathering.popleft().wait()


def _flat(gradient: Tensor, slot: Slot, ranks: int) -> Tensor:
    """The flat gradient for `_chunk_cat`, which pads to equal shares; padded here if shares are whole blocks."""
    flat = gradient.reshape(-1)
    if -(-slot.elements // ranks) == slot.shard_elements:
        return flat
    return functional.pad(flat, (0, slot.shard_elements * ranks - slot.elements))
