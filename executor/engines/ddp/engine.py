"""The ddp engine: torch's DistributedDataParallel as the replica, for cross-checks."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from executor.engine import Engine, RankContext
from executor.engines.ddp.capability import DDP
from executor.engines.native.offload import step_scaled, update_groups
from executor.engines.session import ParallelSession, loss_from, refuse
from executor.engines.sources import DTYPES
from executor.parallel.groups import ParallelGroups
from executor.parallel.initialization import materialise
from executor.parallel.replica import ModelPart, Replica
from search_spaces.models.model import Model, ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


class DdpEngine(Engine):
    """DistributedDataParallel with `bucket_cap_mb` from `reduce_bucket_size`; bf16 by autocast over fp32 parameters."""

    capability = DDP

    def build(self, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> ParallelSession:
        refuse(DDP, context, model, config, workload)
        # Branches of a user's module get no gradient on ranks whose samples do not take them.
        unused = not isinstance(model, ModelSpec)

        def make_replica(part: ModelPart, groups: ParallelGroups) -> Replica:
            return DdpReplica(part, config, workload, groups, context.device, unused)

        return ParallelSession(context, model, config, workload, make_replica)


class DdpReplica(Replica):
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
        dtype = torch.promote_types(next(part.module.parameters()).dtype, torch.float32)
        materialise(part.module, part.values, device, dtype)
        bare = part.module.to(device=device, dtype=dtype)
        # DDP would not find the loss in a user-defined object, and would treat every parameter as unused.
        inner = _LossOnly(bare) if unused_parameters else bare
        inner = _Autocast(inner, device.type) if DTYPES[config.precision] == torch.bfloat16 else inner
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
        precise = next(bare.parameters()).dtype == torch.float32
        fused = config.fused_optimizer and precise
        self.optimizer = torch.optim.AdamW(
            update_groups([parameter for parameter in bare.parameters() if parameter.requires_grad], fused),
            lr=workload.learning_rate,
            weight_decay=workload.weight_decay,
            fused=fused,
            foreach=not fused,
        )

    def begin_micro_batch(self, last: bool) -> None:
        if isinstance(self.module, DistributedDataParallel):
            # Set as by `no_sync()`, for forward and backward: earlier micro-batches only accumulate.
            self.module.require_backward_grad_sync = last

    def end_micro_batch(self) -> None:
        """Nothing to do: DDP's hooks have reduced the gradients."""

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

    def skip_update(self) -> None:
        self.optimizer.zero_grad()

    def settled(self) -> bool:
        return bool(self.optimizer.state)

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
