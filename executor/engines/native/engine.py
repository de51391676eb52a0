"""The native engine behind the contract: builds a sharded model for a rank and runs optimizer steps."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.data import Data, FactoryData, micro_batches, text_data
from executor.engine import Engine, EngineSession, RankContext, StepReport
from executor.engines.native.capability import NATIVE
from executor.engines.native.checkpointing import checkpoint_blocks
from executor.engines.native.collectives import Group
from executor.engines.native.model import Transformer, build_transformer
from executor.engines.native.prefetch import repeated_blocks
from executor.engines.native.zero import ShardedModel
from executor.errors import EngineRefusalError, FactoryError
from executor.factory import load_factory
from search_spaces.model import Model, ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


class NativeEngine(Engine):
    """ZeRO 0-3 over data parallel, with every knob of `NATIVE`."""

    capability = NATIVE

    def build(self, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> EngineSession:
        _refuse(context, config, workload)
        module, data = _materialize(model, config, workload)
        return NativeSession(context, module, data, config, workload)


class NativeSession(EngineSession):
    """One model on this rank."""

    def __init__(self, context: RankContext, module: nn.Module, data: Data, config: TrialConfig, workload: Workload) -> None:
        self.context, self.data, self.config, self.workload = context, data, config, workload
        # Before sharding, since the gather hooks must stay outside the region that runs again.
        checkpoint_blocks(_blocks(module), config)
        self._group = Group(dist.group.WORLD if context.world_size > 1 else None, context.world_size, context.rank)
        self.model = ShardedModel(module, config, workload, self._group, context.device)
        self.accumulation = config.gradient_accumulation_steps(workload.global_batch_size, context.world_size)
        self._scale = 1.0 / (self.accumulation * context.world_size)
        self._batches: list[dict[str, Tensor]] = []
        self._dtype = DTYPES[config.precision]

    def prepare(self, step: int) -> None:
        mine = micro_batches(
            self.data.global_batch(step),
            rank=self.context.rank,
            ranks=self.context.world_size,
            micro_batch_size=self.config.micro_batch_size,
            global_batch_size=self.workload.global_batch_size,
        )
        self._batches = [{name: self._place(value) for name, value in batch.items()} for batch in mine]

    def train_step(self) -> StepReport:
        losses = []
        for index, batch in enumerate(self._batches):
            self.model.begin_micro_batch(last=index == len(self._batches) - 1)
            loss = _loss(self.model.module(**batch))
            (loss * self._scale).backward()  # type: ignore[no-untyped-call]
            self.model.end_micro_batch()
            losses.append(loss.detach())
        norm = self.model.update()
        return StepReport(loss=float(torch.stack(losses).mean()), gradient_norm=norm)

    def settled(self) -> bool:
        return self.model.settled()

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.tagged_storages()
        for batch in self._batches:
            yield from (("activations", value) for value in batch.values())

    def collectives(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        return {(operation, "data"): sent for operation, sent in self._group.sent.items()}

    def close(self) -> None:
        self.model.close()
        self._batches = []

    def _place(self, value: Tensor) -> Tensor:
        """On the device, floating inputs in the model's type. A copy, so that no micro-batch keeps the whole batch alive."""
        dtype = self._dtype if value.is_floating_point() else value.dtype
        return value.to(device=self.context.device, dtype=dtype, copy=True)


def _refuse(context: RankContext, config: TrialConfig, workload: Workload) -> None:
    """Refuse what would compute something else than was asked for, however the request got here."""
    refusal = NATIVE.refusal(config)
    if refusal is not None:
        raise EngineRefusalError("engine-honours", refusal)
    if workload.global_batch_size % (config.micro_batch_size * context.world_size):
        raise EngineRefusalError(
            "batch-divides",
            f"global batch {workload.global_batch_size} is not a multiple of micro-batch {config.micro_batch_size} "
            f"x {context.world_size} ranks; change micro_batch_size or the global batch",
        )


def _materialize(model: Model, config: TrialConfig, workload: Workload) -> tuple[nn.Module, Data]:
    dtype = DTYPES[config.precision]
    if isinstance(model, ModelSpec):
        module = build_transformer(model, workload.sequence_length, workload.seed, dtype, config.loss_chunk_size)
        return module, text_data(workload, model.vocab_size)
    torch.manual_seed(workload.seed)
    theirs, batch = load_factory(model.reference)
    return theirs.to(dtype), FactoryData(batch=batch, workload=workload)


def _blocks(module: nn.Module) -> list[nn.Module]:
    return list(module.blocks) if isinstance(module, Transformer) else repeated_blocks(module)


def _loss(output: object) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise FactoryError("the module's call must return the loss (one number) or an object with .loss")
    return loss
