"""The native engine: the contract of an engine with ZeRO 0-3 in every parallel dimension, and its session."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from executor.engine import Engine, RankContext
from executor.engines.native.capability import NATIVE
from executor.engines.native.checkpoint import Piece, Saved, bytes_of, load, save
from executor.engines.native.zero import ShardedModel
from executor.engines.native.zero_experts import ShardedExperts
from executor.engines.session import ParallelSession, refuse
from executor.errors import CheckpointError, EngineRefusalError
from executor.parallel.graphs import Capture, CudaCapture, refuse_graphs
from executor.parallel.groups import ParallelGroups
from executor.parallel.replica import ModelPart, Replica
from search_spaces.models.model import Model
from search_spaces.models.pipeline import stage_config
from search_spaces.trial import CheckpointTimes, Workload
from search_spaces.trial_config import TrialConfig


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
