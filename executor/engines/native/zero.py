"""ZeRO 0-3 for any module: sharding, the hooks of a micro-batch, and the update."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from executor.engine import HOST
from executor.engines.native.buckets import GradientReducer
from executor.engines.native.checkpoint import MOMENTS, STEPS, WEIGHTS, Piece, rectangles
from executor.engines.native.file_shard import FileShard, share_in_files
from executor.engines.native.offload import Initial, SplitAdamW, hyperparameters_of, parts_of
from executor.engines.native.optimizers import block_matrices, device_optimizer
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer, Shares, share_block
from executor.engines.native.parameter_shard import (
    BucketLayout,
    DeviceShard,
    HostShard,
    MasterShard,
    NearCopies,
    ParameterShard,
    Slot,
    WithQuantised,
    from_rows,
    make_layout,
    ranges,
)
from executor.engines.native.prefetch import ParameterGatherer, find_units
from executor.engines.native.refill import Refill, RefillBesideForward
from executor.errors import EngineRefusalError
from executor.files.rank_file import folder_of
from executor.parallel import copies
from executor.parallel.collectives import ProcessGroup, mark
from executor.parallel.copies import CopyEngine, HostPool, Staging
from executor.parallel.groups import Sharing
from executor.parallel.initialization import Drawn, FirstValues, Given, Joined, Share, is_plain, move_without_memory
from executor.parallel.model import EXPERTS
from executor.parallel.replica import ModelPart, Replica
from executor.parallel.summed_products import close_sum, is_stand_in, open_sum
from executor.parallel.tensor import Matrix
from search_spaces.communication import INT8
from search_spaces.optimizers import BF16_MASTERS
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


class ShardedModel(Replica):
    """A module whose optimizer state (stage 1), gradients (2) and parameters (3) are sharded over the data-parallel ranks.

    1. Each trainable parameter is cut into one padded share per rank. A rank's shares form one flat master vector in fp32
       (fp64 for fp64 parameters), which the optimizer updates. At stage 0 every rank holds the whole vector, and parameters of
       the master's dtype are views of it.
    2. During a micro-batch's backward `GradientReducer` reduces the gradients.
    3. `update` scales, steps, and updates the parameters: in place at stage 0, by all-gathers of `allgather_bucket_size`
       elements at stages 1 and 2 (`Refill`), on next use at stage 3 (`ParameterGatherer`).

    Frozen parameters have neither gradient nor master nor optimizer state. They stay whole on every rank; at stage 3, if
    `ModelPart.reads_in_units` allows it, each rank keeps its shares in the parameters' dtype, and gathers include them.
    [Rajbhandari et al. 2020, ZeRO; 2021, ZeRO-Infinity]
    """

    reports_waits = True

    def __init__(
        self,
        part: ModelPart,
        config: TrialConfig,
        workload: Workload,
        groups: Sharing,
        device: torch.device,
        has: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`has`: whether a parameter of this name is sharded here; the others have their own sharding."""
        self.part, self.module, self._workload = part, part.module, workload
        self.config, self.group, self.device = config, groups.shard, device
        self.tensor = groups.tensor
        self.sharded = config.zero_stage > 0
        self.ranks = self.group.size if self.sharded else 1
        self.own_row = self.group.rank if self.sharded else 0
        move_without_memory(self.module, device)
        trainable = [(name, value) for name, value in self.module.named_parameters() if value.requires_grad and has(name)]
        gathers_blocks = config.gather_dtype == INT8 and config.zero_stage == 3
        blocks = share_block if config.optimizer == "adamw8bit" or gathers_blocks else (lambda _: 1)
        self.layout: BucketLayout = make_layout(trainable, self.ranks, config.reduce_bucket_size, blocks)
        self._summands = [slot for slot in self.layout.slots if slot.name in part.summands]
        self._whole = [slot for slot in self.layout.slots if slot.name not in part.split]
        # Frozen parameters of a user's module may have another dtype, such as those next to adapters.
        floating = [value for value in self.module.parameters() if value.is_floating_point()]
        self.dtype = next(value.dtype for value in (*(value for _, value in trainable), *floating))
        shards_frozen = part.reads_in_units and config.zero_stage == 3
        fixed = [(name, value) for name, value in self.module.named_parameters() if not value.requires_grad and shards_frozen]
        plain, packed = ([item for item in fixed if item[1].is_floating_point() == kind] for kind in (True, False))
        self._frozen = make_layout(plain, self.ranks, config.reduce_bucket_size, blocks, self.layout.master_elements)
        self._packed = make_layout(packed, self.ranks, config.reduce_bucket_size, offset=self._frozen.master_elements)
        self.gradient_dtype = torch.promote_types(self.dtype, torch.float32)
        self.master_dtype = self.dtype if config.optimizer == BF16_MASTERS else self.gradient_dtype
        initial = Initial(self._place_parameters(), self.master_dtype, device)
        frozen = self._shard_frozen(self._frozen, self.layout.master_elements, self.dtype)
        quantised = self._shard_frozen(self._packed, self._frozen.master_elements, torch.uint8)
        self._place_rest()
        self.refill = self._make_refill()
        self.pool, self._copies = HostPool(device), CopyEngine(device)
        self.optimizer = self._make_optimizer(initial, workload)
        if self._views:
            master = self.optimizer.full_master()
            for slot in self.layout.slots:
                slot.parameter.data = master[slot.offset : slot.offset + slot.shard_elements].view(slot.shape)
        arrives = self.optimizer.host_elements and config.offload_param == "none"
        self._arrivals = Staging(self.optimizer.chunk_elements if arrives else 0, self.dtype, self.pool, self._copies)
        self._shard = self._beside_quantised(self._make_shard(frozen), quantised)
        accumulates = config.gradient_accumulation_steps(workload.global_batch_size, groups.mesh.world_size) > 1
        matrices = self._matrices()
        self.reducer = GradientReducer(
            self.layout, self.group, groups.replica, config, self.gradient_dtype, device, accumulates, [*matrices]
        )
        self.gatherer = self._make_gatherer(groups.near_group) if config.zero_stage == 3 else None
        self.window_is_step = config.pipeline_parallel_size > 1 or not config.reshard_after_forward
        self._gradient: list[Tensor] | None = None
        self._stream: torch.Stream | None = None
        """The stream of the step, on which gradients are moved."""
        self._hooks = [self._hook(slot) for slot in self.layout.slots]
        self._nodes: list[Node] = []
        """Autograd's nodes of parameters with hooks, which live only as long as something refers to them."""
        self._hooks += [self._open_sum(slot, matrices[slot]) for slot in self.layout.slots if slot in self.reducer.summed]

    def begin_step(self) -> None:
        if self.refill is not None:
            self.refill.begin_step()

    def begin_micro_batch(self, last: bool) -> None:
        self._stream = copies.working_stream(self.device)
        self.reducer.skips_reduction = self.optimizer.sums_itself
        self.reducer.begin_micro_batch(last)
        if self.gatherer is not None:
            self.gatherer.begin_backward(last)
        if last:
            self.optimizer.begin()

    def gradients_written(self) -> None:
        for slot in self.layout.slots:
            self.reducer.take(slot)

    def end_micro_batch(self) -> None:
        self.reducer.end_micro_batch()
        if self.gatherer is not None:
            self.gatherer.end_backward()
            if not self.window_is_step:
                self.gatherer.end_window()

    def end_step(self) -> None:
        if self.gatherer is not None and self.window_is_step:
            self.gatherer.end_window()

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Sum over the tensor-parallel ranks once per step, on the share that results from all other reductions."""
        self._gradient = self.reducer.take_shares()
        self.tensor.all_reduce_parts([self._share(slot) for slot in self._summands])

    def tied_gradient(self) -> Tensor | None:
        tied_slots = [slot for slot in self.layout.slots if slot.name in self.part.tied]
        return self._share(tied_slots[0]) if tied_slots else None

    @torch.no_grad()
    def squared_norm(self, counts_tied: bool) -> Tensor:
        """If gradients are not reduced: the mean of the squared norms of the ranks' gradients, an upper bound."""
        gradient = self._finished()
        skipped = set(self._whole) if self.tensor.rank else set()
        if not counts_tied:
            skipped |= {slot for slot in self.layout.slots if slot.name in self.part.tied}
        parts = gradient if not skipped else [self._share(slot) for slot in self.layout.slots if slot not in skipped]
        zero = torch.zeros((), dtype=self.gradient_dtype, device=self.device)
        squared = nn.utils.get_total_norm(parts, foreach=True).square() if parts else zero
        if self.reducer.skips_reduction:
            # Each rank's gradient is a summand of the mean, 1/R of its own gradient: the mean of squares is R times their sum.
            self.group.all_reduce(squared).wait()
            squared = squared * self.group.size
        return squared

    @torch.no_grad()
    def update(self, scale: Tensor | None) -> None:
        gradient, self._gradient = self._finished(), None
        # Below stage 3 the share in the parameters' dtype is mostly needed only until it has been gathered.
        shard = self._shard or self._device_shard()
        self.optimizer.step(gradient, shard, scale)
        del gradient
        self._share_update(shard)

    def skip_update(self) -> None:
        self._gradient = None

    def settled(self) -> bool:
        """Whether the gather trace has been recorded and the optimizer's state exists."""
        return self.optimizer.settled() and not (self.gatherer and self.gatherer.recording)

    def full_parameters(self) -> dict[str, Tensor]:
        """Every trainable parameter, whole, by name, from the master vector. Every rank must call it."""
        whole = {}
        master = self.optimizer.full_master()
        for slot in self.layout.slots:
            rows = torch.empty(self.ranks, slot.shard_elements, dtype=master.dtype, device=self.device)
            shard = master[slot.offset : slot.offset + slot.shard_elements]
            if self.ranks == 1:
                rows[0].copy_(shard)
            else:
                self.group.all_gather(rows, shard.clone()).wait()
            whole[slot.name] = from_rows(rows, slot).view(slot.shape).clone()
        return whole

    def saved_pieces(self) -> Iterator[Piece]:
        """The master values and moments of every trained parameter, as rectangles of the whole tensors, and the steps.

        Raises:
            EngineRefusalError: the optimizer's states are not saved.
        """
        if not isinstance(self.optimizer, SplitAdamW):
            problem = f"checkpoints hold the states of adamw, not of {self.config.optimizer}; use optimizer=adamw"
            raise EngineRefusalError("checkpoint-optimizer", problem)
        slots = [slot for slot in self.layout.slots if slot.parameter.dim() <= 2]
        if len(slots) < len(self.layout.slots):
            raise EngineRefusalError("checkpoint-shapes", "parameters of three dimensions are not saved; use a model of ours")
        for state, first, values in self.optimizer.states():
            prefix = f"{MOMENTS}{state}." if state else WEIGHTS
            for slot in slots:
                yield from self._pieces_of(slot, prefix, first, values)
        for counter in self.optimizer.steps():
            yield Piece(name=STEPS, shape=torch.Size((1,)), offsets=torch.Size((0,)), values=counter)

    @torch.no_grad()
    def state_loaded(self) -> None:
        """Bring the parameters up to date with master values that were written into the pieces."""
        assert isinstance(self.optimizer, SplitAdamW)
        shard = self._shard or self._device_shard()
        self.optimizer.publish(shard)
        self._share_update(shard)

    def _pieces_of(self, slot: Slot, prefix: str, first: int, values: Tensor) -> Iterator[Piece]:
        """The part of a vector from index `first` on that is this rank's share of a parameter, without padding."""
        begin = self.own_row * slot.shard_elements
        end = min(begin + slot.shard_elements, slot.elements)
        low = max(slot.offset, first)
        high = min(slot.offset + end - begin, first + values.numel())
        if low >= high:
            return
        split, size = self.part.split.get(slot.name), self.tensor.size
        shape = [length * (size if dimension == split else 1) for dimension, length in enumerate(slot.shape)]
        offsets = [length * self.tensor.rank if dimension == split else 0 for dimension, length in enumerate(slot.shape)]
        drawn = self.part.values.get(slot.name)
        name = drawn.name if isinstance(drawn, Drawn) else slot.name
        piece_values = values[low - first : high - first]
        yield from rectangles(f"{prefix}{name}", piece_values, begin + low - slot.offset, slot.shape, shape, offsets)

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that live between steps."""
        for parameter in self.module.parameters():
            yield "parameters", parameter.data
        for buffer in self.module.buffers():
            yield "buffers", buffer
        for gradient in self.reducer.held_tensors():
            yield "gradients", gradient
        # At stage 0 with parameters as views, the master shares their storage and was yielded with them.
        yield from (("optimizer_state", value) for value in self.optimizer.device_tensors())
        if self._shard is not None:
            yield from (("parameters", value) for value in self._shard.tensors())
        if self.gatherer is not None and self.gatherer.near_copies is not None:
            yield from (("parameters", value) for value in self.gatherer.near_copies.tensors())
        yield from ((HOST, value) for value in self.pool.tensors())

    def close(self) -> None:
        """Remove every hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()
        for slot in self.reducer.summed:
            close_sum(slot.parameter)
        if self.gatherer is not None:
            self.gatherer.close()
        if self.refill is not None:
            self.refill.close()
        self.optimizer.close()
        if self._shard is not None:
            self._shard.close()

    @property
    def _views(self) -> bool:
        """Whether parameters are views of the master vector."""
        return self.config.zero_stage == 0 and self.dtype == self.master_dtype

    @torch.no_grad()
    def _place_parameters(self) -> FirstValues:
        """Move the trainable parameters to the device in the stage's form; return the initial values of the master.

        Whole parameters are created on the device, and the master is copied from them; otherwise only the master is created,
        where it will be stored.
        """
        shares: list[FirstValues] = []
        for slot in self.layout.slots:
            values = self.part.values_of(slot.name, slot.parameter)
            if self.config.zero_stage == 3:
                # It needs its own storage, which is freed and filled in place.
                slot.parameter.data = self._without_memory(slot)
            elif not self._views:
                self._place_whole(slot.name, slot.parameter)
                values = Given(slot.parameter)
            shares.append(self._share_of(slot, values))
        return Joined(shares)

    def _share_of(self, slot: Slot, values: FirstValues) -> Share:
        return Share(values, self.own_row * slot.shard_elements, slot.shard_elements)

    def _without_memory(self, slot: Slot) -> Tensor:
        """A tensor of a parameter's shape on the device, with an empty storage."""
        empty = torch.empty(slot.shape, dtype=slot.parameter.dtype, device=self.device)
        empty.untyped_storage().resize_(0)
        return empty

    def _place_whole(self, name: str, parameter: nn.Parameter) -> None:
        if name in self.part.values:
            parameter.data.untyped_storage().resize_(parameter.nbytes)
            self.part.values[name].fill(parameter.data)
        else:
            parameter.data = parameter.data.to(self.device)

    @torch.no_grad()
    def _shard_frozen(self, layout: BucketLayout, start: int, dtype: torch.dtype) -> Tensor:
        """This rank's shares of the frozen parameters that stage 3 gathers, on the device; empty at other stages."""
        vector = torch.empty(layout.master_elements - start, dtype=dtype, device=self.device)
        for slot in layout.slots:
            share = vector[slot.offset - start : slot.offset - start + slot.shard_elements]
            self._share_of(slot, self.part.values_of(slot.name, slot.parameter)).fill(share)
            slot.parameter.data = self._without_memory(slot)
        return vector

    def _place_rest(self) -> None:
        """Move frozen parameters that stay whole, and buffers, to the device."""
        sharded = {slot.name for layout in (self._frozen, self._packed) for slot in layout.slots}
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad and name not in sharded and is_plain(parameter):
                self._place_whole(name, parameter)
        for module in self.module.modules():
            if not all(map(is_plain, module.parameters(recurse=False))):
                module._apply(lambda value: value.to(self.device), recurse=False)  # type: ignore[no-untyped-call]
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))

    def _make_optimizer(self, initial: Initial, workload: Workload) -> SplitAdamW | DeviceOptimizer:
        config, layout = self.config, self.layout
        hyperparameters = hyperparameters_of(config, workload)
        if config.optimizer != "adamw":
            matrices = block_matrices(self.part) if config.optimizer == "muon" else frozenset[str]()
            shares = Shares(
                layout=layout, own_row=self.own_row, group=self.group, tensor=self.tensor, split=self.part.split,
                matrices=matrices, tied=self.part.tied, seed=workload.seed,
            )  # fmt: skip
            return device_optimizer(config, initial.make(0, layout.master_elements), shares, hyperparameters)
        ratio = config.offload_ratio if config.offload_optimizer != "none" else 0.0
        pieces = [layout.columns(bucket) for bucket in range(len(layout.buckets))]
        make_share = share_in_files(workload) if config.offload_optimizer == "nvme" else None
        return SplitAdamW(initial, ratio, hyperparameters, self.pool, self._copies, pieces, make_share=make_share)

    def _make_refill(self) -> Refill | None:
        """The refill that updates whole parameters; None: not needed, or parameters are gathered on use."""
        config = self.config
        if config.zero_stage not in (1, 2) or self.ranks == 1:
            return None
        if not config.overlap_param_gather:
            return Refill(self.layout.slots, self.group, config)
        # A user's module may read a parameter anywhere, so all must be up to date before it runs.
        units = find_units(self.module, self.part.units if self.part.reads_in_units else (), self.layout.slots)
        return RefillBesideForward(units, self.group, config)

    def _make_gatherer(self, near_group: ProcessGroup | None) -> ParameterGatherer:
        slots = (*self.layout.slots, *self._frozen.slots, *self._packed.slots)
        units = find_units(self.module, self.part.units, slots, self.part.outside)
        assert self._shard is not None
        copies = NearCopies(near_group, self.ranks) if near_group is not None else None
        return ParameterGatherer(units, self._shard, self.group, self.config, self._declare_ready, copies)

    def _declare_ready(self, slots: Iterable[Slot]) -> None:
        """Skip frozen parameters, which are gathered with the others but never reduced."""
        self.reducer.declare_ready(slot for slot in slots if slot.parameter.requires_grad)

    def _make_shard(self, frozen: Tensor) -> ParameterShard | None:
        """The shard that gathers read; None: one is created for each update."""
        if not self.optimizer.host_elements and self.config.offload_param == "none":
            return MasterShard(self.optimizer.full_master(), self.dtype, frozen)
        if self.config.zero_stage < 3:
            # If gathers of the next step read it, it is kept between steps.
            return self._device_shard() if self.refill is not None and self.refill.spans_steps else None
        shard: ParameterShard
        if self.config.offload_param == "cpu":
            shard = HostShard(self._frozen.master_elements, self.dtype, self.device, self.pool, self._copies)
        elif self.config.offload_param == "nvme":
            shard = self._file_shard()
        else:
            shard = self._device_shard()
        if len(frozen):
            shard.accept_from_device(self.layout.master_elements, frozen)
        self.optimizer.publish(shard)
        return shard

    def _beside_quantised(self, shard: ParameterShard | None, quantised: Tensor) -> ParameterShard | None:
        if shard is None or not len(quantised):
            return shard
        packed: ParameterShard = DeviceShard(len(quantised), torch.uint8, self.device, self._arrivals)
        if self.config.offload_param != "none":  # they are small, so that they are in host memory even if offload_param is nvme
            packed = HostShard(len(quantised), torch.uint8, self.device, self.pool, self._copies)
        packed.accept_from_device(0, quantised)
        packed.finish()
        return WithQuantised(shard, packed, self._frozen.master_elements)

    def _file_shard(self) -> FileShard:
        units = find_units(self.module, self.part.units, (*self.layout.slots, *self._frozen.slots), self.part.outside)
        read = [[pair for slot in unit.slots for pair in ranges((slot,))] for unit in units]
        frozen = parts_of(self.layout.master_elements, self._frozen.master_elements)
        pieces, folder = [*self.optimizer.update_ranges(), *frozen], folder_of(self._workload)
        return FileShard(pieces, read, self.dtype, self.device, self.pool, self._copies, folder)

    def _device_shard(self) -> DeviceShard:
        return DeviceShard(self._frozen.master_elements, self.dtype, self.device, self._arrivals)

    def _hook(self, slot: Slot) -> torch.utils.hooks.RemovableHandle:
        hook: torch.utils.hooks.RemovableHandle = slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: self._gradient_done(slot)
        )
        return hook

    def _gradient_done(self, slot: Slot) -> None:
        if slot.parameter.grad is not None:
            mark("gradients", slot.parameter.grad)
        with copies.resumed(self._stream):
            self.reducer.take(slot)
            if self.gatherer is None:
                self.reducer.declare_ready((slot,))
            else:
                self.gatherer.gradient_done(slot)

    def _matrices(self) -> dict[Slot, Matrix]:
        """The weights that each micro-batch multiplies by once, in a module of our own; experts multiply by many at a time."""
        uses = Counter(value for module in self.module.modules() for value in module.parameters(recurse=False))
        weights = {module.weight: module for module in self.module.modules() if isinstance(module, Matrix) and module.once}
        once = (slot for slot in self.layout.slots if uses[slot.parameter] == 1 and EXPERTS not in slot.name)
        return {slot: weights[slot.parameter] for slot in once if slot.parameter in weights}

    def _open_sum(self, slot: Slot, matrix: Matrix) -> torch.utils.hooks.RemovableHandle:
        """Let the matrix's products add to the bucket. A stand-in reaches the parameter when they have, and goes no further."""

        def add(gradient: Tensor, x: Tensor) -> None:
            with copies.resumed(self._stream):
                self.reducer.add_product(slot, gradient, x)

        def added(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
            if not is_stand_in(gradients[0]):
                return None
            self._gradient_done(slot)
            return (None,)

        matrix.has_sum = True
        open_sum(slot.parameter, add)
        node = get_gradient_edge(slot.parameter).node
        self._nodes.append(node)
        hook: torch.utils.hooks.RemovableHandle = node.register_prehook(added)
        return hook

    def _finished(self) -> list[Tensor]:
        if self._gradient is None:
            raise RuntimeError("the gradient is not reduced yet; call finish_gradients() first")
        return self._gradient

    def _share(self, slot: Slot) -> Tensor:
        """This rank's part of a parameter's gradient."""
        return self._finished()[slot.bucket][slot.column : slot.column + slot.shard_elements]

    def _share_update(self, shard: ParameterShard) -> None:
        if self.gatherer is not None:
            self.gatherer.parameters_changed()
        elif self.refill is not None:
            self.refill.update(shard)
        elif self.config.zero_stage or self.dtype != self.master_dtype:
            targets = [slot.parameter.data.view(-1) for slot in self.layout.slots]
            shard.copy_to(targets, [span for slot in self.layout.slots for span in ranges((slot,))])
