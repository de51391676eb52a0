"""The native engine: ZeRO 0-3 in every parallel dimension, experts sharded apart, and a session whose states can be saved."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from executor.engine import Engine, RankContext
from executor.engines.capabilities import NATIVE
from executor.engines.native.checkpoint import Piece, Saved, bytes_of, load, save
from executor.engines.native.zero import ShardedModel
from executor.engines.session import ParallelSession, refuse
from executor.errors import CheckpointError, EngineRefusalError
from executor.parallel.graphs import Capture, CudaCapture, refuse_graphs
from executor.parallel.groups import ParallelGroups
from executor.parallel.replica import ModelPart, Replica
from search_spaces.models.model import Model
from search_spaces.models.pipeline import stage_config
from search_spaces.trial import CheckpointTimes, Workload
from search_spaces.trial_config import TrialConfig


class ShardedExperts(Replica):
    """Common parameters are sharded over all data-parallel ranks; experts over the ranks that hold the same ones.

    An expert processes the tokens of all ranks of its expert-parallel group, so its gradient already is the sum over them; it
    is reduced only over the ranks with the same experts [Rajbhandari et al. 2022, DeepSpeed-MoE, 5.2]. These include ranks of a
    tensor group that do not divide each expert, since each has its own part of the group's tokens. Bucket and prefetch sizes
    apply to each of the two shardings separately.
    """

    reports_waits = True

    def __init__(
        self, part: ModelPart, config: TrialConfig, workload: Workload, groups: ParallelGroups, device: torch.device
    ) -> None:
        def is_expert(name: str) -> bool:
            return name in part.experts

        self.module, self._groups = part.module, groups
        common = ShardedModel(part, config, workload, groups.common, device, lambda name: not is_expert(name))
        experts = ShardedModel(part, config, workload, groups.of_experts, device, is_expert)
        self._common, self._experts, self._both = common, experts, (common, experts)
        self.sharded = common.sharded

    def begin_step(self) -> None:
        for shards in self._both:
            shards.begin_step()

    def begin_micro_batch(self, last: bool) -> None:
        for shards in self._both:
            shards.begin_micro_batch(last)

    def gradients_written(self) -> None:
        for shards in self._both:
            shards.gradients_written()

    def end_micro_batch(self) -> None:
        for shards in self._both:
            shards.end_micro_batch()

    def end_step(self) -> None:
        for shards in self._both:
            shards.end_step()

    def finish_gradients(self) -> None:
        for shards in self._both:
            shards.finish_gradients()

    def tied_gradient(self) -> Tensor | None:
        return self._common.tied_gradient()

    @torch.no_grad()
    def squared_norm(self, counts_tied: bool) -> Tensor:
        """Without sharding, every rank holds all common parameters but only its own experts, whose norm must be summed.

        The caller sums the result over tensor ranks, as if each had its own slice of experts.
        """
        groups, experts = self._groups, self._experts.squared_norm(counts_tied)
        if not self.sharded:
            groups.expert.all_reduce(experts).wait()
            if groups.expert_tensor.size < groups.tensor.size:
                groups.expert_tensor.all_reduce(experts).wait()
                experts = experts / groups.tensor.size
        return self._common.squared_norm(counts_tied) + experts

    def update(self, scale: Tensor | None) -> None:
        for shards in self._both:
            shards.update(scale)

    def skip_update(self) -> None:
        for shards in self._both:
            shards.skip_update()

    def settled(self) -> bool:
        return all(shards.settled() for shards in self._both)

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        for shards in self._both:
            yield from shards.tagged_storages()

    def full_parameters(self) -> dict[str, Tensor]:
        """This rank's experts and the common parameters, by name."""
        return {name: value for shards in self._both for name, value in shards.full_parameters().items()}

    def saved_pieces(self) -> Iterator[Piece]:
        for shards in self._both:
            yield from shards.saved_pieces()

    def state_loaded(self) -> None:
        for shards in self._both:
            shards.state_loaded()

    def close(self) -> None:
        for shards in self._both:
            shards.close()


class NativeSession(ParallelSession):
    """A model whose states can be saved under this layout and loaded under another."""

    def save_checkpoint(self, folder: Path) -> Saved:
        """Write all trained states to a folder, between two steps. Every rank calls it.

        Raises:
            EngineRefusalError: this configuration's states are not saved.
            CheckpointError: the folder cannot be written.
        """
        return save(folder, list(self._pieces()))

    def load_checkpoint(self, folder: Path) -> float:
        """Replace all trained states by those in a folder, whatever layout saved them; return the seconds. Every rank calls it.
        The data do not belong to the states: `prepare` is called with the step that comes next.

        Raises:
            EngineRefusalError: this configuration's states are not saved.
            CheckpointError: it is not a checkpoint of this model and optimizer, or it is damaged.
        """
        seconds = load(folder, list(self._pieces()))
        for replica in self.replicas:
            assert isinstance(replica, ShardedModel | ShardedExperts)
            replica.state_loaded()
        return seconds

    def time_checkpoint(self, folder: Path) -> CheckpointTimes | None:
        try:
            pieces = list(self._pieces())
        except EngineRefusalError:
            return None
        checkpoint_folder = _new_folder(folder)
        try:
            saved = save(checkpoint_folder, pieces)
            seconds = self.load_checkpoint(checkpoint_folder)
        finally:
            if dist.is_initialized():
                dist.barrier()
            shutil.rmtree(checkpoint_folder, ignore_errors=True)
        return CheckpointTimes(bytes=bytes_of(saved), save_seconds=saved.seconds, load_seconds=seconds)

    def _pieces(self) -> Iterator[Piece]:
        if self.scaler is not None:
            raise EngineRefusalError("checkpoint-fp16", "the loss scale of fp16 is not saved; use precision=bf16 or fp32")
        for replica in self.replicas:
            assert isinstance(replica, ShardedModel | ShardedExperts)
            yield from replica.saved_pieces()


def _new_folder(folder: Path) -> Path:
    """A new folder below `folder`, the same on every rank.

    Raises:
        CheckpointError: it cannot be made.
    """
    paths: list[str] = [""]
    problem = ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            paths = [tempfile.mkdtemp(prefix="autotune-checkpoint-", dir=folder)]
        except OSError as error:
            problem = str(error.strerror)
    if dist.is_initialized():
        dist.broadcast_object_list(paths, src=0)
    if not paths[0]:
        reason = f" ({problem})" if problem else ""
        raise CheckpointError(f"{folder}: cannot be written{reason}; name a folder that every node has, with --checkpoint-path")
    return Path(paths[0])


class NativeEngine(Engine):
    """ZeRO 0-3 over data x context ranks, with tensor, sequence, context and pipeline parallelism: every knob of `NATIVE`."""

    capability = NATIVE

    def __init__(self, capture: type[Capture] = CudaCapture) -> None:
        """`capture`: the class that captures graphs of blocks."""
        self._capture = capture

    def build(self, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> NativeSession:
        refuse(NATIVE, context, model, config, workload)
        refuse_graphs(context, model, config, workload, self._capture)

        def make_replica(part: ModelPart, groups: ParallelGroups) -> Replica:
            stage_settings = stage_config(config, part.stage)
            if part.experts:
                return ShardedExperts(part, stage_settings, workload, groups, context.device)
            return ShardedModel(part, stage_settings, workload, groups.common, context.device)

        capture = self._capture() if config.cuda_graphs else None
        return NativeSession(context, model, config, workload, make_replica, capture)
