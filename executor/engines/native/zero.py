"""ZeRO 0-3 around any module: sharding, the hooks of a micro-batch, and the update."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.engines.native.buckets import IN_FLIGHT, GradientReducer
from executor.engines.native.collectives import Group, InFlight, mark
from executor.engines.native.layout import Layout, Slot, as_rows, from_rows, make_layout, master_shards
from executor.engines.native.prefetch import ParameterGatherer, find_units
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


@dataclass(slots=True)
class _Refill:
    """Updated parameters on their way back to every rank."""

    work: InFlight
    slots: tuple[Slot, ...]
    rows: Tensor
    shard: Tensor


class ShardedModel:
    """A module whose optimizer state (stage 1), gradients (2) and parameters (3) are shared out over the data-parallel ranks.

    1. Each trainable parameter is cut into one padded share a rank. A rank's shares are one flat master vector in fp32 (fp64
       for fp64 parameters), which AdamW updates. At stage 0 everyone holds the whole vector, and parameters of the master's
       own type are views of it.
    2. `backward` runs one micro-batch; gradients leave through `GradientReducer`.
    3. `update` clips by the global norm, steps, and brings changed parameters back: nothing at stage 0, all-gathers of
       `allgather_bucket_size` elements at stages 1 and 2, on next use at stage 3 (`ParameterGatherer`).

    Frozen parameters stay whole on every rank and have neither gradient nor optimizer state.
    [Rajbhandari et al. 2020, ZeRO; 2021, ZeRO-Infinity]
    """

    def __init__(self, module: nn.Module, config: TrialConfig, workload: Workload, group: Group, device: torch.device) -> None:
        self.module, self.config, self.group, self.device = module, config, group, device
        self.clipping = workload.gradient_clipping
        self.ranks = group.size if config.zero_stage else 1
        self.own_row = group.rank if config.zero_stage else 0
        trainable = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
        self.layout: Layout = make_layout(trainable, self.ranks, config.reduce_bucket_size)
        self.master = nn.Parameter(self._shard_parameters(trainable[0][1].dtype))
        self.optimizer = torch.optim.AdamW(
            [self.master],
            lr=workload.learning_rate,
            weight_decay=workload.weight_decay,
            fused=config.fused_optimizer and self.master.dtype == torch.float32,
            foreach=False if not config.fused_optimizer or self.master.dtype != torch.float32 else None,
        )
        self.reducer = GradientReducer(self.layout, group, config, self.master.dtype, device)
        self.gatherer = self._make_gatherer() if config.zero_stage == 3 else None
        self._hooks = [self._hook(slot) for slot in self.layout.slots]

    def begin_micro_batch(self, last: bool) -> None:
        """Call before each micro-batch's forward."""
        self.reducer.begin_micro_batch(last)
        if self.gatherer is not None:
            self.gatherer.begin_micro_batch()

    def end_micro_batch(self) -> None:
        """Call after each micro-batch's backward."""
        self.reducer.end_micro_batch()
        if self.gatherer is not None:
            self.gatherer.end_micro_batch()

    @torch.no_grad()
    def update(self) -> float | None:
        """Clip, step and bring the parameters back. Returns the global gradient norm before clipping, None without clipping."""
        gradient = self.reducer.take_shard()
        norm = self._clip(gradient) if self.clipping else None
        self.master.grad = gradient
        self.optimizer.step()
        self.master.grad = None
        self._share_update()
        return norm

    def settled(self) -> bool:
        """Whether the gather trace is recorded and the optimizer's state exists."""
        return bool(self.optimizer.state) and not (self.gatherer and self.gatherer.recording)

    def full_parameters(self) -> dict[str, Tensor]:
        """Every trainable parameter whole, as the optimizer left it, by name. Every rank must call it."""
        whole = {}
        for slot in self.layout.slots:
            rows = torch.empty(self.ranks, slot.shard_elements, dtype=self.master.dtype, device=self.device)
            shard = self.master.data[slot.offset : slot.offset + slot.shard_elements]
            if self.ranks == 1:
                rows[0].copy_(shard)
            else:
                self.group.all_gather(rows, shard.clone()).wait()
            whole[slot.name] = from_rows(rows, slot).view(slot.shape).clone()
        return whole

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that live between steps."""
        for parameter in self.module.parameters():
            yield "parameters", parameter.data
        for buffer in self.module.buffers():
            yield "buffers", buffer
        for gradient in self.reducer.held_tensors():
            yield "gradients", gradient
        # At stage 0 with parameters as views, the master is the parameters and was counted with them.
        yield "optimizer_state", self.master.data
        for state in self.optimizer.state.values():
            yield from (("optimizer_state", value) for value in state.values() if isinstance(value, Tensor))

    def close(self) -> None:
        """Remove every hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.gatherer is not None:
            self.gatherer.close()

    @torch.no_grad()
    def _shard_parameters(self, dtype: torch.dtype) -> Tensor:
        """Make this rank's master vector on the device, and bring the parameters there in the form that the stage keeps."""
        master_dtype = torch.promote_types(dtype, torch.float32)
        master = torch.zeros(self.layout.master_elements, dtype=master_dtype, device=self.device)
        for slot in self.layout.slots:
            share = master[slot.offset : slot.offset + slot.shard_elements]
            share.copy_(as_rows(slot.parameter.data, slot, self.ranks)[self.own_row])
            if self.config.zero_stage == 0 and dtype == master_dtype:
                slot.parameter.data = share.view(slot.shape)
            elif self.config.zero_stage == 3:
                # A storage of its own, since it is emptied and filled in place.
                slot.parameter.data = torch.empty(slot.shape, dtype=dtype, device=self.device)
            else:
                slot.parameter.data = slot.parameter.data.to(self.device)
        self._move_rest()
        return master

    def _move_rest(self) -> None:
        """Frozen parameters and buffers stay whole."""
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self.device)
        for module in self.module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))

    def _make_gatherer(self) -> ParameterGatherer:
        units = find_units(self.module, self.layout.slots)
        return ParameterGatherer(units, self.master.data, self.group, self.config, self.reducer.declare_ready)

    def _hook(self, slot: Slot) -> torch.utils.hooks.RemovableHandle:
        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is not None:
                mark("gradients", parameter.grad)
            self.reducer.take(slot)
            if self.gatherer is None:
                self.reducer.declare_ready((slot,))
            else:
                self.gatherer.gradient_done(slot)

        hook: torch.utils.hooks.RemovableHandle = slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            accumulated
        )
        return hook

    def _clip(self, gradient: Tensor) -> float:
        """Scale the gradient so that its global L2 norm is at most `clipping` [Pascanu et al. 2013]."""
        squared = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)).square()
        if self.ranks > 1:
            self.group.all_reduce(squared).wait()
        norm = squared.sqrt()
        gradient.mul_((self.clipping / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def _share_update(self) -> None:
        if self.gatherer is not None:
            self.gatherer.parameters_changed()
        elif self.ranks > 1:
            self._gather_updated()
        elif self.layout.slots[0].parameter.dtype != self.master.dtype or self.config.zero_stage:
            for slot in self.layout.slots:
                share = self.master.data[slot.offset : slot.offset + slot.elements]
                slot.parameter.data.view(-1).copy_(share)

    def _gather_updated(self) -> None:
        """Stages 1 and 2: one all-gather a bucket, the next one sent while the last one is copied where they overlap."""
        in_flight: deque[_Refill] = deque()
        for slots in _cut(self.layout.slots, self.config.allgather_bucket_size):
            in_flight.append(self._send_refill(slots))
            while len(in_flight) > (IN_FLIGHT - 1 if self.config.overlap_comm else 0):
                self._land_refill(in_flight.popleft())
        while in_flight:
            self._land_refill(in_flight.popleft())

    def _send_refill(self, slots: tuple[Slot, ...]) -> _Refill:
        dtype = slots[0].parameter.dtype
        shard = master_shards(self.master.data, slots).to(dtype)
        rows = torch.empty(self.ranks, shard.numel(), dtype=dtype, device=self.device)
        mark("buffers", rows)
        return _Refill(self.group.all_gather(rows, shard), slots, rows, shard)

    def _land_refill(self, refill: _Refill) -> None:
        refill.work.wait()
        column = 0
        for slot in refill.slots:
            rows = refill.rows[:, column : column + slot.shard_elements]
            slot.parameter.data.view(-1).copy_(from_rows(rows, slot))
            column += slot.shard_elements


def _cut(slots: Sequence[Slot], limit: int) -> Iterator[tuple[Slot, ...]]:
    """Neighbouring slots in groups of at most `limit` elements; a larger one alone."""
    group: list[Slot] = []
    elements = 0
    for slot in slots:
        if group and elements + slot.elements > limit:
            yield tuple(group)
            group, elements = [], 0
        group.append(slot)
        elements += slot.elements
    if group:
        yield tuple(group)
