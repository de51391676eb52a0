"""Gradient reduction: gradients of ZeRO 0-3 into flat shards, through fixed buckets."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from executor.engines.native.layout import Layout, Slot, as_rows, cut
from executor.engines.native.quantised_sums import QuantisedAllReduce, QuantisedReduceScatter
from executor.parallel.collectives import Group, InFlight, mark, shares_memory
from search_spaces.compression import INT8
from search_spaces.trial_config import TrialConfig

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types that gradients may be sent or summed in beside the master's own, which `fp32` stands for."""
IN_FLIGHT = 2
"""Buckets that may be on the way at once where communication overlaps: one sends while the next one fills."""
PIECE_ELEMENTS = 4_000_000
"""Gradients that wait for one another to be moved by one operation. Moving more takes a GPU longer than starting the operation,
so that larger pieces would cost memory and gain nothing."""
CASTS = {(torch.bfloat16, torch.float32)}
"""Pairs of types between which `_chunk_cat` casts on every device."""


@dataclass(slots=True)
class _Piece:
    """Neighbours in a bucket whose gradients are moved into it together."""

    slots: tuple[Slot, ...]
    waiting: set[Slot] = field(default_factory=set)
    """Those whose gradients are in `parameter.grad`."""


@dataclass(slots=True)
class _Sent:
    """A bucket on its way: its tensors must live until the collective has ended."""

    work: InFlight | QuantisedReduceScatter | QuantisedAllReduce
    bucket: int
    rows: Tensor | None
    output: Tensor | None
    """None: what `work` gives when it is waited for."""
    first: bool
    """Whether it is the bucket's first reduction in this step: later ones are added to it."""
    last: bool
    """Whether it is the bucket's last reduction in this step."""


class GradientReducer:
    """Turns the gradients of a step into this rank's share of their sum.

    1. Gradients that are ready are moved out of `parameter.grad` into their bucket: a matrix [ranks, columns] whose row r is
       what rank r owns. They wait for their neighbours until there are up to `PIECE_ELEMENTS`, which one operation moves.
       (`contiguous_gradients` off: they stay where they are, where autograd adds to them if the type is that of sums, until
       the whole bucket is ready, and the bucket is put together then.)
    2. When all of a bucket's parameters are declared ready and all buckets before it are sent, it is reduced: all-reduce at
       stage 0, reduce-scatter above. The order is the layout's on every rank; at the end of a micro-batch buckets that are
       still waiting are sent, with zeros for parameters that had no gradient on this rank.
       Of `reduce_dtype=int8` it is quantised, sent by all-to-all and summed where it arrives; at stage 0 what each rank has
       summed is gathered then, and so are sums over copies of the shards.
    3. What arrives is added to the flat gradient shard. After its last reduction in a step, a bucket's share becomes one of
       the master's type and is summed over the copies of the shards (HSDP) while others are still on the way.

    Stages 0 and 1, and stage 2 with `defer_gradient_reduction`, sum full gradients over the micro-batches of a step and reduce
    at the last one; stages 2 and 3 reduce at every micro-batch and sum their shares [Rajbhandari et al. 2020, ZeRO, 5.2]. Both
    sum in `accumulation_dtype`, whatever the type that is sent. Losses are scaled before backward, so sums are means.
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
        replicas: Group,
        config: TrialConfig,
        master_dtype: torch.dtype,
        device: torch.device,
        accumulates: bool = True,
    ) -> None:
        """`accumulates`: a step may have several micro-batches."""
        self.layout, self.group, self.replicas, self.device = layout, group, replicas, device
        # In a pipeline another micro-batch's work follows at once: what is on the way may be beside it.
        self.lands_at_once = config.pipeline_parallel_size == 1
        self.master_dtype = master_dtype
        self.reduce_dtype = NARROW.get(config.reduce_dtype, master_dtype)
        self.integers = config.reduce_dtype == INT8
        self.stays = False
        """Whether gradients stay this rank's own: the optimizer sums what ranks send."""
        self.sum_dtype = NARROW.get(config.accumulation_dtype, master_dtype)
        self.contiguous = config.contiguous_gradients
        self.overwritten = config.cuda_graphs
        """Whether the next micro-batch's backward writes its gradients where this one's are, so that what stays is copied."""
        self.limit = IN_FLIGHT if config.overlap_comm else 0
        self.every_micro_batch = config.zero_stage == 3 or (config.zero_stage == 2 and not config.defer_gradient_reduction)
        self._shares: dict[int, Tensor] = {}
        # Not where each micro-batch is reduced: the next one would overwrite what the last has left there.
        alone = layout.ranks == 1 and not self.every_micro_batch
        self.rows_dtype = self.sum_dtype if accumulates and not self.every_micro_batch else self.reduce_dtype
        """Of full gradients: what is sent as soon as it is there is not summed before."""
        self._in_share = alone and self.reduce_dtype == self.rows_dtype == master_dtype
        self._rows: dict[int, Tensor] = {}
        self._held: dict[Slot, Tensor] = {}
        # Nor more than one parameter, whose gradient waits anyway until it is moved: waiting takes no more memory than that.
        most = min(PIECE_ELEMENTS, max((slot.elements for slot in layout.slots), default=0))
        self._pieces = [[_Piece(slots) for slots in cut(bucket, lambda slot: slot.elements, most)] for bucket in layout.buckets]
        self._piece_of = {slot: piece for pieces in self._pieces for piece in pieces for slot in piece.slots}
        self._ready: set[Slot] = set()
        self._missing: list[int] = []
        """Of each bucket, parameters that are not declared ready in this micro-batch."""
        self._filled: set[Slot] = set()
        self._begun: set[int] = set()
        self._sent: deque[_Sent] = deque()
        self._next = 0
        self._reduces = self._last = True
        self._gathering: deque[QuantisedAllReduce] = deque()
        """Stage 0: sums of integers of which every rank gathers the others' parts."""
        self._last_sums: list[InFlight | QuantisedAllReduce] = []
        """Of shares, in place: nothing is added to them any more."""

    def begin_micro_batch(self, last: bool) -> None:
        """Every micro-batch but the last only accumulates, unless the stage reduces each."""
        self._last = last
        self._reduces = last or self.every_micro_batch
        self._next = 0
        self._ready.clear()
        self._missing = [len(bucket) for bucket in self.layout.buckets]

    @torch.no_grad()
    def declare_ready(self, slots: Iterable[Slot]) -> None:
        """These parameters get no more gradient in this micro-batch; send the buckets that this completes.

        Where other collectives run during backward (stage 3), it must be called at the same point between them on every
        rank, whether or not the rank has these gradients.
        """
        for slot in slots:
            if slot not in self._ready:
                self._ready.add(slot)
                self._missing[slot.bucket] -= 1
        while self._reduces and self._next < len(self.layout.buckets) and not self._missing[self._next]:
            self._send_next()

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Send what is waiting; outside of a pipeline, wait for what is on the way."""
        for bucket in range(self._next, len(self.layout.buckets)):
            self._collect_rest(bucket)
        while self._reduces and self._next < len(self.layout.buckets):
            self._send_next()
        if self.lands_at_once:
            self._land_all()

    @torch.no_grad()
    def take_shares(self) -> list[Tensor]:
        """This rank's share of the mean gradient, in the master's type, flat by bucket; the reducer forgets it."""
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
        """The gradient in `parameter.grad` has this micro-batch's summand; called once per parameter and micro-batch."""
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

    def _collect(self, piece: _Piece) -> None:
        """Move what waits of a piece into the bucket, all at once where nothing is missing."""
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
        """Pieces of which a parameter had no gradient."""
        for piece in self._pieces[bucket]:
            if piece.waiting:
                self._collect(piece)

    def _put(self, slots: Sequence[Slot], gradients: Sequence[Tensor], adds: bool) -> None:
        """Copy or add the gradients of neighbours to their bucket: one operation, or two where a sum or a place between others
        needs them side by side first.
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
            direct = not adds and target.is_contiguous() and (dtype == target.dtype or (dtype, target.dtype) in CASTS)
            rows = target if direct else torch.empty(target.shape, dtype=dtype, device=target.device)
            torch._chunk_cat(parts, dim=0, num_chunks=ranks, out=rows)
            if direct:
                return
            mark("buffers", rows)
        target.add_(rows) if adds else target.copy_(rows)

    def _bucket_rows(self, bucket: int) -> Tensor:
        """The bucket's matrix; at stage 0 the share itself, so that nothing is copied back."""
        if bucket not in self._rows:
            columns, ranks = self.layout.columns(bucket), self.layout.ranks
            if self._in_share:
                self._rows[bucket] = self._share(bucket).view(1, columns)
            else:
                self._rows[bucket] = torch.empty(ranks, columns, dtype=self.rows_dtype, device=self.device)
                mark("gradients" if not self.every_micro_batch else "buffers", self._rows[bucket])
        return self._rows[bucket]

    def _share(self, bucket: int) -> Tensor:
        """What this rank has of a bucket's gradient; made when the bucket comes, since activations are fewer by then."""
        if bucket not in self._shares:
            dtype = self._share_dtype(bucket)
            self._shares[bucket] = torch.empty(self.layout.columns(bucket), dtype=dtype, device=self.device)
            mark("gradients", self._shares[bucket])
        return self._shares[bucket]

    def _share_dtype(self, bucket: int) -> torch.dtype:
        """Of the share that is there, or would be made now: the type of sums where others are still to be added."""
        if bucket in self._shares:
            return self._shares[bucket].dtype
        return self.master_dtype if self._last or not self.every_micro_batch else self.sum_dtype

    def _finish_share(self, bucket: int) -> Tensor:
        """The share in the master's type, once nothing more is added to it."""
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
        self._sent.append(_Sent(work, bucket, rows if output is not None else None, output, first, self._last))
        while len(self._sent) > self.limit:
            self._land(self._sent.popleft())

    def _reduce(
        self, bucket: int, rows: Tensor, first: bool
    ) -> tuple[InFlight | QuantisedReduceScatter | QuantisedAllReduce, Tensor | None]:
        """Start the sum over ranks; where it lands."""
        if self.layout.ranks == 1:
            whole = rows.view(-1)
            if self.integers and self.group.size > 1 and not self.stays:
                return QuantisedAllReduce(self.group, whole, self._widths(bucket)), whole
            return InFlight(lambda: None) if self.stays else self.group.all_reduce(rows), whole
        if self.integers:
            widths = self._widths(bucket)
            return QuantisedReduceScatter(self.group, torch.split(rows, widths, dim=1), widths, rows.dtype), None
        output = self._landing_place(bucket, rows, first)
        return self.group.reduce_scatter(output, rows), output

    def _assemble(self, bucket: int) -> Tensor:
        """The bucket's matrix with zeros where this rank has no gradient."""
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
        """Put gradients into the bucket that have stayed where they were; `together`: it lacks none."""
        held = [self._held.pop(slot) if slot in self._held else slot.parameter.grad for slot in slots]
        gradients = [gradient for gradient in held if gradient is not None]
        if together:
            self._put(slots, gradients, adds=False)
        else:
            for slot, gradient in zip(slots, gradients, strict=True):
                self._put((slot,), (gradient,), adds=False)
        for slot in slots:
            slot.parameter.grad = None

    def _landing_place(self, bucket: int, rows: Tensor, first: bool) -> Tensor:
        """The share itself where the types are alike; what a later reduction adds to it goes into this rank's own row first."""
        if self.reduce_dtype == self._share_dtype(bucket):
            share = self._share(bucket)
            if not first:
                self._land_until(bucket)
                rows[self.group.rank].add_(share)
            return share
        output = torch.empty(rows.shape[1], dtype=self.reduce_dtype, device=self.device)
        mark("buffers", output)
        return output

    def _land_until(self, bucket: int) -> None:
        """Wait for what is on the way of this bucket."""
        while any(sent.bucket == bucket for sent in self._sent):
            self._land(self._sent.popleft())

    def _land(self, sent: _Sent) -> None:
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
            if self.replicas.size > 1:
                self._last_sums.append(self._sum_copies(sent.bucket, share))

    def _sum_copies(self, bucket: int, share: Tensor) -> InFlight | QuantisedAllReduce:
        if self.integers:
            return QuantisedAllReduce(self.replicas, share, self._widths(bucket))
        return self.replicas.all_reduce(share)

    def _widths(self, bucket: int) -> list[int]:
        return [slot.shard_elements for slot in self.layout.buckets[bucket]]

    def _land_parts(self, work: QuantisedAllReduce, bucket: int, whole: Tensor) -> None:
        """Stage 0, which reduces once a step: the parts that ranks have summed are gathered in the share itself."""
        work.gather()
        if bucket not in self._shares:
            self._shares[bucket] = whole
            mark("gradients", whole)
        self._gathering.append(work)
        while len(self._gathering) > self.limit:
            self._gathering.popleft().wait()


def _flat(gradient: Tensor, slot: Slot, ranks: int) -> Tensor:
    """The gradient as `_chunk_cat` takes it, which pads it to equal shares by itself; here to whole blocks."""
    flat = gradient.reshape(-1)
    if -(-slot.elements // ranks) == slot.shard_elements:
        return flat
    return functional.pad(flat, (0, slot.shard_elements * ranks - slot.elements))
