"""The engines ddp and fsdp2, for cross-checks: torch's DistributedDataParallel and `fully_shard` as the replica."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from executor.engine import Engine, RankContext
from executor.engines.capabilities import DDP, FSDP2
from executor.engines.native.offload import adamw, hyperparameters_of, step_scaled
from executor.engines.session import ParallelSession, refuse
from executor.engines.sources import DTYPES, require_one_dtype
from executor.errors import EngineRefusalError
from executor.parallel.collectives import ProcessGroup, all_gather_single, reduce_scatter_single
from executor.parallel.groups import ParallelGroups
from executor.parallel.initialization import FirstValues, Share, materialise
from executor.parallel.replica import ModelPart, Replica
from executor.user_module.survey import loss_from
from search_spaces.mesh import CONTEXT, DATA
from search_spaces.models.model import Model, ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


class TorchReplica(Replica):
    """A module that a class of torch keeps consistent, and torch's AdamW updates.

    `unused_parameters`: branches of a user's module get no gradient on ranks whose samples do not take them.
    """

    optimizer: torch.optim.AdamW

    @abstractmethod
    def __init__(
        self,
        part: ModelPart,
        config: TrialConfig,
        workload: Workload,
        groups: ParallelGroups,
        device: torch.device,
        unused_parameters: bool,
    ) -> None: ...

    def end_micro_batch(self) -> None:
        """Nothing to do: torch's hooks have reduced the gradients."""

    def skip_update(self) -> None:
        self.optimizer.zero_grad()

    def settled(self) -> bool:
        return bool(self.optimizer.state)


class TorchEngine(Engine):
    """An engine whose replica is of torch."""

    replica: type[TorchReplica]

    def build(self, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> ParallelSession:
        refuse(self.capability, context, model, config, workload)
        unused_parameters = not isinstance(model, ModelSpec)

        def make_replica(part: ModelPart, groups: ParallelGroups) -> Replica:
            return self.replica(part, config, workload, groups, context.device, unused_parameters)

        return ParallelSession(context, model, config, workload, make_replica)


class DdpReplica(TorchReplica):
    """A whole copy of the module; gradients are summed in buckets during backward. A single rank needs no wrapper."""

    sharded = False

    def __init__(
        self,
        part: ModelPart,
        config: TrialConfig,
        workload: Workload,
        groups: ParallelGroups,
        device: torch.device,
        unused_parameters: bool,
    ) -> None:
        self.groups = groups
        # A module of several dtypes stays as it is.
        dtypes = {parameter.dtype for parameter in part.module.parameters() if parameter.is_floating_point()}
        dtype = torch.promote_types(dtypes.pop(), torch.float32) if len(dtypes) == 1 else None
        materialise(part.module, part.values, device, dtype)
        bare = part.module.to(device=device, dtype=dtype)
        # DDP would not find the loss in a user-defined object, and would treat every parameter as unused.
        inner = _LossOnly(bare) if unused_parameters else bare
        is_narrow = DTYPES[config.precision] == torch.bfloat16 and dtype is not None
        inner = _Autocast(inner, device.type) if is_narrow else inner
        self.bare, self.module = bare, inner
        if groups.shard.size > 1:
            bytes_per_element = next(bare.parameters()).element_size()
            wrapper = DistributedDataParallel(
                inner,
                process_group=groups.shard.group,
                bucket_cap_mb=config.reduce_bucket_size * bytes_per_element / 2**20,
                gradient_as_bucket_view=True,
                find_unused_parameters=unused_parameters,
            )
            wrapper.register_comm_hook(None, self._sum)
            self.module = wrapper
        trained = [parameter for parameter in bare.parameters() if parameter.requires_grad]
        self.optimizer = adamw(trained, hyperparameters_of(config, workload))

    def begin_micro_batch(self, last: bool) -> None:
        if isinstance(self.module, DistributedDataParallel):
            # Set as by `no_sync()`, for forward and backward: earlier micro-batches only accumulate.
            self.module.require_backward_grad_sync = last

    def finish_gradients(self) -> None:
        """Nothing to do: backward ends when the last bucket has been reduced."""

    def tied_gradient(self) -> Tensor | None:
        return None

    @torch.no_grad()
    def squared_norm(self, counts_tied: bool) -> Tensor:  # noqa: ARG002  without a pipeline nothing is duplicated
        return nn.utils.get_total_norm(self._gradients(), foreach=True).square()

    @torch.no_grad()
    def update(self, scale: Tensor | None) -> None:
        step_scaled(self.optimizer, scale)
        self.optimizer.zero_grad()

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("parameters", parameter.data) for parameter in self.bare.parameters())
        yield from (("buffers", buffer) for buffer in self.bare.buffers())
        for state in self.optimizer.state.values():
            yield from (("optimizer_state", value) for value in state.values() if isinstance(value, Tensor))

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.bare.named_parameters() if value.requires_grad}

    def close(self) -> None:
        self.module = self.bare

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.bare.parameters() if parameter.grad is not None]

    def _sum(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Communication hook: sum instead of mean, since losses are scaled before backward."""
        gradients = bucket.buffer()
        self.groups.shard.count("all_reduce", gradients)
        work: Any = dist.all_reduce(gradients, group=self.groups.shard.group, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future


class DdpEngine(TorchEngine):
    """DistributedDataParallel with `bucket_cap_mb` from `reduce_bucket_size`; bf16 by autocast over fp32 parameters."""

    capability = DDP
    replica = DdpReplica


class _LossOnly(nn.Module):
    """Returns only the loss of a user's module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return loss_from(self.inner(*args, **kwargs))


class _Autocast(nn.Module):
    """Runs a module under bf16 autocast."""

    def __init__(self, inner: nn.Module, device_type: str) -> None:
        super().__init__()
        self.inner, self.device_type = inner, device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, torch.bfloat16):
            return self.inner(*args, **kwargs)


class FullyShardedReplica(TorchReplica):
    """A module whose parameters are DTensors over the data x context ranks, in fp32, with bf16 copies while gathered.

    Reductions are sums, since losses are scaled before backward. With one rank there is nothing to shard, and the module is
    not wrapped.
    """

    def __init__(
        self,
        part: ModelPart,
        config: TrialConfig,
        workload: Workload,
        groups: ParallelGroups,
        device: torch.device,
        unused_parameters: bool,
    ) -> None:
        require_one_dtype(part.module, "fsdp2")
        for name, parameter in part.module.named_parameters():
            if not parameter.dim():
                problem = f"parameter {name} has no dimension, of which fully_shard needs one"
                raise EngineRefusalError("fsdp2-scalars", f"{problem}; use engine=native, or a tensor of one element")
        self.part, self.groups = part, groups
        self.module = part.module.to(torch.promote_types(_dtype(part.module), torch.float32))
        self.reshards = config.zero_stage == 3
        self.sharded, self.device = groups.mesh.zero_ranks > 1, device
        if self.sharded:
            self._shard(config, device, unused_parameters)
            materialise(self.module, self._shares(), torch.device("cpu") if config.offload_param == "cpu" else device)
        else:
            materialise(self.module, part.values, device)
            self.module.to(device)
        self.optimizer = adamw([*self.module.parameters()], hyperparameters_of(config, workload))

    def begin_micro_batch(self, last: bool) -> None:
        if isinstance(self.module, FSDPModule):
            self.module.set_is_last_backward(last)
            # Stage 2 gathers once per step; stage 3 frees after every backward, whatever it does after forward.
            self.module.set_reshard_after_backward(last or self.reshards)

    @torch.no_grad()
    def finish_gradients(self) -> None:
        summands = [gradient for name, gradient in self._gradients() if name in self.part.summands]
        self.groups.tensor.all_reduce_parts(summands)

    def tied_gradient(self) -> Tensor | None:
        return next((gradient.view(-1) for name, gradient in self._gradients() if name in self.part.tied), None)

    @torch.no_grad()
    def squared_norm(self, counts_tied: bool) -> Tensor:
        first = self.groups.tensor.rank == 0
        squared = [
            torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)).square()
            for name, gradient in self._gradients()
            if (first or name in self.part.split) and (counts_tied or name not in self.part.tied)
        ]
        return torch.stack(squared).sum().to(self.device) if squared else torch.zeros((), device=self.device)

    @torch.no_grad()
    def update(self, scale: Tensor | None) -> None:
        gradients = [gradient for _, gradient in self._gradients()]
        if scale is not None and gradients:
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        for parameter in self.module.parameters():
            yield "parameters", _local(parameter.data)
        yield from (("buffers", buffer) for buffer in self.module.buffers())
        for state in self.optimizer.state.values():
            yield from (("optimizer_state", _local(value)) for value in state.values() if isinstance(value, Tensor))

    def full_parameters(self) -> dict[str, Tensor]:
        return {
            name: self._gather(parameter) if isinstance(parameter, DTensor) else parameter.detach()
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }

    def close(self) -> None:
        """Nothing to do: nothing is held outside the module."""

    @torch.no_grad()
    def _gather(self, parameter: DTensor) -> Tensor:
        """The whole parameter, gathered from all ranks' rows. Not `full_tensor()`: DTensor caches groups of earlier trials."""
        group = self.groups.shard
        rows = -(-parameter.shape[0] // group.size)
        shard = torch.zeros(rows, *parameter.shape[1:], dtype=parameter.dtype)
        local = _local(parameter)
        shard[: local.shape[0]] = local.cpu()
        gathered = torch.empty(group.size, shard.numel(), dtype=shard.dtype, device=self.device)
        group.all_gather(gathered, shard.to(gathered.device).view(-1)).wait()
        return gathered.view(-1, *shard.shape[1:])[: parameter.shape[0]]

    def _shard(self, config: TrialConfig, device: torch.device, unused_parameters: bool) -> None:
        reshard = config.zero_stage == 3 and config.reshard_after_forward
        precise = torch.promote_types(DTYPES[config.precision], torch.float32)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if config.precision == "bf16" else None,
            reduce_dtype=torch.bfloat16 if config.reduce_dtype == "bf16" else precise,
        )
        offload: OffloadPolicy = OffloadPolicy()
        if config.offload_param == "cpu":
            offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        mesh = self._device_mesh(device)
        # A parameter that is read outside of its unit, such as a table tied at both ends, belongs to the model as a whole.
        owners = Counter(id(parameter) for unit in self.part.units for parameter in unit.parameters())
        outside = {id(self.module.get_parameter(name)) for name in self.part.outside}
        units = [
            unit
            for unit in self.part.units
            if all(owners[id(parameter)] == 1 and id(parameter) not in outside for parameter in unit.parameters())
        ]
        for unit in (*units, self.module):
            # Backward gathers again only if torch finds a tensor in the module's output; a user's module may return any object.
            again = reshard and not (unit is self.module and unused_parameters)
            sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=again, mp_policy=policy, offload_policy=offload)
            sharded.set_gradient_divide_factor(1.0)
            # In fp32 and bf16 a custom divide factor would need a reduce op that only NCCL has.
            sharded.set_force_sum_reduction_for_comms(True)
            if any(True for _ in unit.parameters(recurse=False)) or unit is not self.module:
                sharded.set_custom_all_gather(CountedAllGather(self.groups.shard))
                sharded.set_custom_reduce_scatter(CountedReduceScatter(self.groups))
        if isinstance(self.module, FSDPModule) and unused_parameters:
            reduce_unused(self.module)
        for module in self.module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    def _shares(self) -> dict[str, FirstValues]:
        """This rank's rows of the parameters on the meta device: equal numbers for all ranks, fewer for the last."""
        shares: dict[str, FirstValues] = {}
        for name, values in self.part.values.items():
            parameter = self.module.get_parameter(name)
            rows = -(-parameter.shape[0] // self.groups.shard.size)
            first = self.groups.shard.rank * rows * (parameter.numel() // parameter.shape[0])
            shares[name] = Share(values, first, _local(parameter).numel())
        return shares

    def _device_mesh(self, device: torch.device) -> DeviceMesh:
        shard, replica = self.groups.shard, self.groups.replica
        if replica.size == 1:
            return DeviceMesh.from_group(_process_group(shard.group), device.type, mesh_dim_names=("shard",))
        zero = self.groups.mesh.groups((CONTEXT, DATA))
        mine = torch.tensor(next(ranks for ranks in zero if self.groups.rank in ranks)).view(-1, shard.size)
        pair = [_process_group(replica.group), _process_group(shard.group)]
        return DeviceMesh.from_group(pair, device.type, mine, mesh_dim_names=("replicate", "shard"))

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Name and this rank's share of each gradient."""
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                yield name, _local(parameter.grad)


class Fsdp2Engine(TorchEngine):
    """`fully_shard` on every block: stage 2 keeps parameters gathered until backward, stage 3 by `reshard_after_forward`."""

    capability = FSDP2
    replica = FullyShardedReplica


def _process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise RuntimeError("a group of one rank has no process group")
    return group


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _local(value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        local: Tensor = value.to_local()
        return local
    return value


class CountedAllGather(AllGather):
    """The default all-gather, counted."""

    def __init__(self, account: ProcessGroup) -> None:
        self._account = account

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._account.count("all_gather", output_tensor)
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedReduceScatter(ReduceScatter):
    """The default reduce-scatter, counted. With copies of the shards (HSDP), FSDP2 then all-reduces its result."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._groups.shard.count("reduce_scatter", input_tensor)
        if self._groups.replica.size > 1:
            self._groups.replica.count("all_reduce", output_tensor)
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def reduce_unused(module: FSDPModule) -> None:
    """Reduce zeros for parameters without a gradient: otherwise ranks that run other branches would send other collectives.

    torch 2.11 has no method for it. There every parameter group sets the zeros before its own reduction.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)
        return
    for unit in module.modules():  # type: ignore[attr-defined]
        group: Any = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        if group is not None:
            group.post_backward = partial(_reduce_with_zeros, group, group.post_backward)


def _reduce_with_zeros(group: Any, reduce: Callable[..., None], *unused: object) -> None:
    for item in group.fsdp_params:
        whole = getattr(item, "_unsharded_param", None)
        if whole is not None and whole.requires_grad and whole.grad is None and item.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)
    reduce(*unused)
