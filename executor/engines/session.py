"""The session that the parallel engines share: a model in parts on this rank, trained step by step, with loss scaling."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from executor.batches import (
    FactoryData,
    forward_seed,
    kept_tokens,
    map_tensors,
    rank_batches,
    seed_generators,
    shortened,
    tensors_of,
    useful_tokens,
)
from executor.engine import HOST, EngineSession, PrivatePool, RankContext, StepReport
from executor.engines.capabilities import version_refusals
from executor.engines.sources import source_of
from executor.errors import EngineRefusalError, WrongResultError
from executor.parallel.activation_offload import ActivationOffload
from executor.parallel.attention import choose_attention_kernel
from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.context import METHODS
from executor.parallel.experts import RouterBalance, set_loss_scale
from executor.parallel.graphs import EAGER_STEPS, BlockGraphs, Capture, compile_blocks, compile_seconds, forget_compiled
from executor.parallel.groups import ParallelGroups
from executor.parallel.model import Transformer
from executor.parallel.pipeline import Pipeline, precise
from executor.parallel.recomputed_modules import recompute_modules
from executor.parallel.replica import ModelPart, Replica
from executor.user_module.survey import loss_from
from search_spaces.capability import Capability
from search_spaces.mesh import DATA, PIPELINE, make_mesh
from search_spaces.models.model import FactoryModel, Model
from search_spaces.optimizers import GROWTH_INTERVAL, INITIAL_SCALE_POWER, LEAST_SCALE
from search_spaces.rules.table import check_shapes
from search_spaces.rules.training import ENGINE_REMEDY, PACK
from search_spaces.training.data_schedule import is_scheduled, job_step, length_at
from search_spaces.training.states import scales_losses
from search_spaces.trial import REFERENCE_STEPS, Workload
from search_spaces.trial_config import TrialConfig


class LossScaler:
    """The factor of a step's losses before backward, by which gradients are divided before the update.

    A step [Micikevicius et al. 2018, Mixed Precision Training, 3.2; as in `torch.amp.GradScaler`]:

    1. Losses are multiplied by `scale`, a power of two, which causes no rounding.
    2. The norm of the gradients over all shares, slices and stages is not finite if any gradient of any rank is not. So the
       sums that clipping needs in any case inform every rank.
    3. If the norm is finite, the update uses gradients divided by `scale`; after GROWTH_INTERVAL such steps in a row the scale
       is doubled. Otherwise no rank updates, and the scale is halved.

    Raises, from `accepts`:
        WrongResultError: gradients overflow at the smallest scale; raised on every rank.
    """

    def __init__(self) -> None:
        self.scale = 2.0**INITIAL_SCALE_POWER
        self._accepted = 0
        """Updates since the last change of the scale."""

    def accepts(self, norm: Tensor) -> bool:
        """Whether to update with scaled gradients of this norm; sets the scale of the next step."""
        # A dry run has no values, so none overflow.
        if is_fake(norm) or bool(torch.isfinite(norm)):
            self._accepted += 1
            if self._accepted == GROWTH_INTERVAL:
                self.scale, self._accepted = self.scale * 2, 0
            return True
        self.scale, self._accepted = self.scale / 2, 0
        if self.scale < LEAST_SCALE:
            raise WrongResultError(
                f"gradients overflow fp16 at a loss scale of {self.scale * 2:g}, below which no scale helps; use precision=bf16"
            )
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Outcome of the update of a step."""

    norm: Tensor | None
    """Gradient norm before clipping; None: clipping is off, or the update was skipped."""
    skipped: bool = False
    """Whether the update was skipped because gradients overflowed."""


MakeReplica = Callable[[ModelPart, ParallelGroups], Replica]


class ParallelSession(EngineSession):
    """One model on this rank, in as many parts as the rank has pipeline stages.

    A part is built in this order: its slice of the matrices (tensor), the layers of its stage (pipeline), checkpointing of
    blocks and offloading of saved tensors, then the replica that shards it over data x context ranks: the gather hooks of a
    replica must stay outside the recomputed region.
    """

    def __init__(
        self,
        context: RankContext,
        model: Model,
        config: TrialConfig,
        workload: Workload,
        make_replica: MakeReplica,
        capture: Capture | None = None,
    ) -> None:
        """`capture`: captures graphs of the blocks; None: they run eagerly."""
        self.context, self.config, self.workload = context, config, workload
        choose_attention_kernel(config.attention_backend)
        mesh = make_mesh(config, context.world_size)
        source = source_of(model, config, workload)
        self._ties, self.data = source.ties, source.data
        self.groups = ParallelGroups(mesh, context, self._ties)
        self.parts = source.parts(self.groups)
        users = [part.module for part in self.parts] if isinstance(model, FactoryModel) else []
        self._repeatable = RepeatableSteps(users, workload, self.groups.coordinates[DATA], mesh.data, source.trains_only)
        for part in self.parts:
            checkpoint_blocks(part.blocks, config, part.stage, draws=isinstance(model, FactoryModel))
            recompute_modules(part.blocks, config.recompute_modules)
            if config.compile_blocks:
                compile_blocks(part.blocks)
        self._activations = ActivationOffload(context.device) if config.offload_activations else None
        if self._activations is not None:
            for part in self.parts:
                self._activations.attach(part.blocks, keeps_last=config.pipeline_parallel_size == 1)
        self._graphs = (
            None if capture is None else BlockGraphs([block for part in self.parts for block in part.blocks], capture)
        )
        self.replicas = [make_replica(part, self.groups) for part in self.parts]
        rate = config.router_bias_update_rate
        self._balance = RouterBalance((part.module for part in self.parts), rate, self.groups) if rate else None
        self.accumulation = config.gradient_accumulation_steps(workload.global_batch_size, context.world_size)
        self._prepared = self.accumulation
        self._input_dtype = source.input_dtype
        self.scaler = LossScaler() if scales_losses(config) else None
        self._batches: list[dict[str, Any]] = []
        self._length = workload.sequence_length
        self._positions = self._own_positions()
        self.pipeline = self._make_pipeline() if config.pipeline_parallel_size > 1 else None

    def prepare(self, step: int, micro_batches: int | None = None) -> None:
        self._prepared = micro_batches or self.accumulation
        self._repeatable.begin(step, self._prepared)
        mine = rank_batches(
            self.data if isinstance(self.data, FactoryData) else self._scheduled(step),
            step,
            rank=self.groups.coordinates[DATA],
            ranks=self.groups.mesh.data,
            size=self.config.micro_batch_size,
            count=self._prepared,
        )
        if self.pipeline is not None:
            mine = [{name: torch.cat([batch[name] for batch in mine]) for name in mine[0]}]
        self._batches = [map_tensors(batch, self._to_device) for batch in mine]
        if self._graphs is not None and step >= EAGER_STEPS:
            self._graphs.capture()

    def train_step(self) -> StepReport:
        return self.launch_step()()

    def launches_steps(self) -> bool:
        return self.scaler is None  # the scaler reads the norm before each update

    def launch_step(self) -> Callable[[], StepReport]:
        loss, update = self.run_step()

        def read() -> StepReport:
            return StepReport(
                loss=None if loss is None else float(loss),
                gradient_norm=None if update.norm is None else float(update.norm),
                skipped=update.skipped,
            )

        return read

    def run_step(self) -> tuple[Tensor | None, Update]:
        """`train_step`, but loss and gradient norm stay on the device."""
        set_loss_scale([part.module for part in self.parts], self._scale(self._prepared))
        loss = self._accumulate() if self.pipeline is None else self.pipeline.run(self._batches[0], self._prepared)
        return loss, self._update()

    def settled(self) -> bool:
        return all(replica.settled() for replica in self.replicas)

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        for replica in self.replicas:
            yield from replica.tagged_storages()
        for batch in self._batches:
            yield from (("activations", value) for value in tensors_of(batch))
        if self._activations is not None:
            yield from ((HOST, value) for value in self._activations.pool.tensors())
        if self.pipeline is not None:
            yield from (("buffers", value) for value in self.pipeline.receive_buffers())
        if self._graphs is not None:
            yield from (("buffers", value) for value in self._graphs.tables())

    def collectives(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        return self.groups.collectives()

    def waited_seconds(self) -> float | None:
        # On CUDA the stream waits, not the host; a replica that waits inside torch cannot report it.
        is_known = self.context.device.type == "cpu" and all(replica.reports_waits for replica in self.replicas)
        return self.groups.clock.seconds if is_known else None

    def compile_seconds(self) -> float:
        return compile_seconds()

    def capture_seconds(self) -> float:
        return 0.0 if self._graphs is None else self._graphs.seconds

    def private_pool(self) -> PrivatePool | None:
        return None if self._graphs is None else self._graphs.pool()

    def full_parameters(self) -> dict[str, Tensor]:
        """This rank's slices of its stages' parameters by name, gathered over data-parallel ranks. Every rank must call it."""
        return {name: value for replica in self.replicas for name, value in replica.full_parameters().items()}

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        self.pipeline = None
        if self._activations is not None:
            self._activations.close()
        if self._graphs is not None:
            self._graphs.close()
        self._repeatable.close()
        self._batches, self.parts, self._balance = [], [], None
        self.groups.close()
        forget_compiled()

    def _scheduled(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step of our own model under the data schedules; prepares the parts for it."""
        assert not isinstance(self.data, FactoryData)
        whole = self.data.global_batch(step)
        if is_scheduled(self.config):
            length = length_at(self.config, self.workload, job_step(self.workload, step))
            if length != self._length:
                self._set_length(length)
            for module in self._transformers():
                module.kept = kept_tokens(self.config, self.workload, module.spec, step, self.context.device)
            whole = shortened(whole, length)
        self._count_targets(whole)
        return whole

    def _count_targets(self, batch: Mapping[str, Tensor]) -> None:
        """If samples contain padding, pass the mean number of targets per prepared micro-batch of all ranks to the head: a mean
        over its own targets would weight the tokens of short documents more than those of long ones."""
        if not self.workload.document_lengths:
            return
        parts = self._prepared * self.groups.mesh.zero_ranks
        samples = self._prepared * self.groups.mesh.data * self.config.micro_batch_size
        targets = useful_tokens({name: value[:samples] for name, value in batch.items()}) / parts
        for module in self._transformers():
            if module.head is not None:
                module.head.targets = targets

    def _set_length(self, length: int) -> None:
        self._length = length
        for module in self._transformers():
            module.set_length(length)
        self._positions = self._own_positions()
        if self.pipeline is not None:
            self.pipeline = self._make_pipeline()

    def _transformers(self) -> list[Transformer]:
        """The modules of the parts; the rules `schedule-model` and `documents-model` ensure that they are our Transformers."""
        return [part.module for part in self.parts if isinstance(part.module, Transformer)]

    def _own_positions(self) -> Tensor | None:
        """Positions of this rank's tokens in a sample; None: it has all of them."""
        context = METHODS[self.config.context_parallel_method](self.groups.context)
        return context.positions(self._length) if context.size > 1 else None

    def _accumulate(self) -> Tensor:
        """Forward and backward of every micro-batch, one after the other. Returns the mean loss."""
        (replica,) = self.replicas
        scale = self._scale(self._prepared)
        losses = []
        replica.begin_step()
        for index, batch in enumerate(self._batches):
            replica.begin_micro_batch(last=index == len(self._batches) - 1)
            loss = loss_from(replica.module(**batch))
            (precise(loss) * scale).backward()  # type: ignore[no-untyped-call]
            replica.end_micro_batch()
            losses.append(loss.detach())
        replica.end_step()
        return torch.stack(losses).mean()

    @torch.no_grad()
    def _update(self) -> Update:
        """Clip and update; with loss scaling, only if no gradient overflowed on any rank."""
        for replica in self.replicas:
            replica.finish_gradients()
        self._sum_tied()
        clipping, scaler = self.workload.gradient_clipping, self.scaler
        norm = self._norm() if clipping or scaler is not None else None
        unscale = 1.0 if scaler is None else 1 / scaler.scale
        if norm is not None and scaler is not None and not scaler.accepts(norm):
            for replica in self.replicas:
                replica.skip_update()
            if self._balance is not None:
                self._balance.drop()
            return Update(norm=None, skipped=True)
        factor = None if norm is None else torch.full_like(norm, unscale)
        if norm is not None and clipping:
            norm = norm * unscale
            factor = (clipping / (norm + 1e-6)).clamp(max=1.0) * unscale
        for replica in self.replicas:
            replica.update(factor)
        if self._balance is not None:
            self._balance.update()
        return Update(norm=norm if clipping else None)

    def _sum_tied(self) -> None:
        """Sum the gradients of a tied weight, of which the first and the last pipeline stage hold a copy each."""
        if self._ties is None or self.groups.coordinates[PIPELINE] not in self._ties:
            return
        copies = [gradient for replica in self.replicas if (gradient := replica.tied_gradient()) is not None]
        if self.groups.tied is not None:
            self.groups.tied.all_reduce(copies[0]).wait()
        else:
            copies[0].add_(copies[1])
            copies[1].copy_(copies[0])

    def _norm(self) -> Tensor:
        """Global L2 norm of the mean gradient over shares, slices and stages; every element counts once."""
        second_copy = self.replicas[-1] if self._ties and self.groups.coordinates[PIPELINE] == self._ties[1] else None
        squared = torch.stack([replica.squared_norm(replica is not second_copy) for replica in self.replicas]).sum()
        if self.replicas[0].sharded:
            self.groups.shard.all_reduce(squared).wait()
        self.groups.tensor.all_reduce(squared).wait()
        self.groups.pipeline.all_reduce(squared).wait()
        return squared.sqrt()

    def _to_device(self, value: Tensor) -> Tensor:
        """Copy this rank's tokens to the device, floating inputs in the dtype that the model expects.

        Always copies, so that no micro-batch keeps the whole batch alive.
        """
        dtype = self._input_dtype if value.is_floating_point() else None
        local_value = value if self._positions is None else value[:, self._positions]
        if self.context.device.type == "cuda":
            local_value = local_value.pin_memory()  # a copy from pageable memory would wait for all work on the device
        return local_value.to(device=self.context.device, dtype=dtype, copy=True, non_blocking=True)

    def _scale(self, micro_batches: int) -> float:
        """Factor for losses, so that sums over micro-batches and ranks are means times the scaler's scale (1 without one)."""
        scale = 1.0 if self.scaler is None else self.scaler.scale
        return scale / (micro_batches * self.groups.mesh.zero_ranks)

    def _make_pipeline(self) -> Pipeline:
        parts = [part.of_length(self._length, self.workload.sequence_length) for part in self.parts]
        pairs = list(zip(self.replicas, parts, strict=True))
        return Pipeline(pairs, self.config, self.groups.pipeline, self.accumulation, self._scale, self.context.device)


def refuse(capability: Capability, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> None:
    """Refuse a request that the engine cannot run as specified.

    Raises:
        EngineRefusalError: with the name of the violated rule.
    """
    if workload.document_lengths and PACK not in capability.knobs:
        raise EngineRefusalError("documents-engine", f"the {capability.engine} engine trains on whole samples; {ENGINE_REMEDY}")
    refusals = capability.refusals(config, context.world_size)
    refusals += check_shapes(config, model, workload, context.world_size)
    refusals += version_refusals(torch.__version__, config, context.device.type)
    if refusals:
        raise EngineRefusalError(refusals[0].rule, f"{refusals[0].message}; {refusals[0].remedy}")


class RepeatableSteps:
    """Makes the first steps of a user's module, whose losses are compared, the same in every layout.

    Dropout is off (the module is in evaluation mode), and before each forward of a micro-batch all random generators are seeded
    with the number of that micro-batch, so that noise drawn in forward is the same.
    """

    def __init__(
        self, modules: Sequence[nn.Module], workload: Workload, rank: int, ranks: int, trains_only: bool = False
    ) -> None:
        """`modules`: the user's module, or its pipeline stages on this rank; `rank` of `ranks`: of data parallelism;
        `trains_only`: the module cannot be trained on in evaluation mode, so it stays in training mode."""
        self._in_training = [] if trains_only else [inner for module in modules for inner in module.modules() if inner.training]
        self._seed, self._rank, self._ranks = workload.seed, rank, ranks
        self._step, self._micro_batches = 0, 1
        self._calls = dict.fromkeys(modules, 0)
        self._hooks = [module.register_forward_pre_hook(self._before) for module in modules]

    def begin(self, step: int, micro_batches: int) -> None:
        """Prepare for a step of this many micro-batches, of which none has run. If gradients overflow, it runs again."""
        self._step, self._micro_batches, self._calls = step, micro_batches, dict.fromkeys(self._calls, 0)
        for module in self._in_training:
            module.training = step >= REFERENCE_STEPS

    def close(self) -> None:
        """Remove the hooks, and drop the modules."""
        while self._hooks:
            self._hooks.pop().remove()
        self._in_training, self._calls = [], {}

    def _before(self, module: nn.Module, _: object) -> None:
        if self._step < REFERENCE_STEPS:
            index = self._calls[module] % self._micro_batches
            seed_generators(forward_seed(self._seed, self._step, self._rank + index * self._ranks))
            self._calls[module] += 1
