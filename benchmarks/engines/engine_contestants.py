"""The engines that `benchmarks/engines/engine.py` compares, each behind `prepare` and `train_step`, with its best settings."""

import contextlib
import gc
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from executor.batches import rank_batches, text_data
from executor.engine import RankContext, StepReport
from executor.engines.native.engine import NativeEngine
from executor.parallel.model import Transformer, build_transformer
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

BYTES = 4
"""Bytes of an element: everything trains in fp32."""


class Contestant(Protocol):
    """The interface that the benchmark uses; `executor.engine.EngineSession` implements it."""

    def prepare(self, step: int) -> None: ...
    def train_step(self) -> StepReport: ...
    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]: ...
    def close(self) -> None: ...


class _Peer:
    """Common part of the peers: the native engine's model class, weights, data and loss scaling."""

    def __init__(self, context: RankContext, spec: ModelSpec, config: TrialConfig, workload: Workload) -> None:
        self.context, self.config, self.workload = context, config, workload
        self.module: Transformer = build_transformer(spec, workload.sequence_length, workload.seed, torch.float32)
        if config.compile_blocks:
            for block in self.module.blocks.children():
                block.compile()
        self.data = text_data(workload, spec.vocab_size)
        self.accumulation = config.gradient_accumulation_steps(workload.global_batch_size, context.world_size)
        self.batches: list[dict[str, Tensor]] = []

    def prepare(self, step: int) -> None:
        mine = rank_batches(
            self.data.global_batch(step),
            step,
            rank=self.context.rank,
            ranks=self.context.world_size,
            size=self.config.micro_batch_size,
            count=self.accumulation,
        )
        self.batches = [{name: value.clone() for name, value in batch.items()} for batch in mine]

    def adamw(self, parameters: Iterator[nn.Parameter]) -> torch.optim.AdamW:
        """The native engine's AdamW, over the module's own parameters."""
        work = self.workload
        return torch.optim.AdamW(parameters, lr=work.learning_rate, weight_decay=work.weight_decay, fused=True)


class DDP(_Peer):
    """torch DistributedDataParallel: buckets of the reduce bucket's size, gradients as views of them."""

    def __init__(self, context: RankContext, spec: ModelSpec, config: TrialConfig, workload: Workload) -> None:
        super().__init__(context, spec, config, workload)
        self.wrapped = DistributedDataParallel(
            self.module,
            bucket_cap_mb=config.reduce_bucket_size * BYTES / 2**20,
            gradient_as_bucket_view=True,
            static_graph=self.accumulation == 1,  # with no_sync, torch 2.13 fails an internal assertion
            broadcast_buffers=False,
        )
        self.optimizer = self.adamw(self.module.parameters())

    def train_step(self) -> StepReport:
        # At the start, so that between steps the gradients point to the buckets; the buckets stay either way.
        self.optimizer.zero_grad()
        losses = []
        for index, batch in enumerate(self.batches):
            last = index == self.accumulation - 1
            with contextlib.nullcontext() if last else self.wrapped.no_sync():
                loss = self.wrapped(**batch)
                (loss / self.accumulation).backward()
            losses.append(loss.detach())
        norm = clip_grad_norm_(self.module.parameters(), self.workload.gradient_clipping, foreach=True)
        self.optimizer.step()
        return StepReport(loss=float(torch.stack(losses).mean()), gradient_norm=float(norm))

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        yield from _tagged(self.module, self.optimizer, self.batches)

    def close(self) -> None:
        del self.wrapped, self.optimizer, self.module


class FSDP2(_Peer):
    """torch fully_shard on every block and the root; without resharding, parameters stay whole until the step's last backward.

    `keeps_root`: embedding, head and last norm stay whole between forward and backward. `prefetches`: the gathers of so many
    blocks are called before the preceding block runs, in forward and in backward. `beside`: gathers are started and waited for
    later (`async_op=True`), so that they overlap with computation without CUDA streams.
    """

    def __init__(
        self,
        context: RankContext,
        spec: ModelSpec,
        config: TrialConfig,
        workload: Workload,
        *,
        keeps_root: bool = False,
        prefetches: int = 0,
        beside: bool = False,
    ) -> None:
        super().__init__(context, spec, config, workload)
        self.reshard = config.zero_stage == 3 and config.reshard_after_forward
        blocks = list(self.module.blocks.children())
        for block in blocks:
            fully_shard(block, reshard_after_forward=self.reshard)
        fully_shard(self.module, reshard_after_forward=self.reshard and not keeps_root)
        for order, setter in ((blocks, "set_modules_to_forward_prefetch"), (blocks[::-1], "set_modules_to_backward_prefetch")):
            for index, module in enumerate((self._root, *order[:-1]) if prefetches else ()):
                getattr(module, setter)(order[index : index + prefetches])
        if beside:
            self._root._set_unshard_async_op(True)
        self.optimizer = self.adamw(self.module.parameters())

    def train_step(self) -> StepReport:
        losses = []
        for index, batch in enumerate(self.batches):
            last = index == self.accumulation - 1
            self._root.set_is_last_backward(last)
            if not self.reshard:
                self._root.set_reshard_after_backward(last)
            loss = self.module(**batch)
            (loss / self.accumulation).backward()
            losses.append(loss.detach())
        # One all-reduce, as in torchtitan: clip_grad_norm_ and the norm's value would each need one.
        norm = get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None], foreach=True)
        norm = norm.full_tensor()  # type: ignore[attr-defined]
        clip_grads_with_norm_(self.module.parameters(), self.workload.gradient_clipping, norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepReport(loss=float(torch.stack(losses).mean()), gradient_norm=float(norm))

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        yield from _tagged(self.module, self.optimizer, self.batches)

    def close(self) -> None:
        del self.optimizer, self.module


class DeepSpeed(_Peer):
    """DeepSpeed ZeRO 0-3 on the CPU, with the native engine's sizes and the same fused AdamW.

    Without `reshard_after_forward` it keeps a parameter that it needs again, as by default; with it, `max_live_parameters`
    must be small too, or it keeps the parameters that its prefetch skipped. `multi_rank_bucket`: at stages 1 and 2 a bucket
    whose gradients belong to several ranks is all-reduced whole; otherwise each rank's part is reduced to that rank.
    """

    def __init__(
        self,
        context: RankContext,
        spec: ModelSpec,
        config: TrialConfig,
        workload: Workload,
        *,
        multi_rank_bucket: bool = True,
    ) -> None:
        super().__init__(context, spec, config, workload)
        self._before = set(live_storages())
        settings = self.settings(config, workload, context.world_size)
        settings["zero_optimization"]["use_multi_rank_bucket_allreduce"] = multi_rank_bucket
        self.engine = _deepspeed().initialize(
            model=self.module,
            optimizer=self.adamw(self.module.parameters()),
            config=settings,
            dist_init_required=False,
        )[0]

    @staticmethod
    def settings(config: TrialConfig, workload: Workload, ranks: int) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": config.zero_stage,
            "reduce_bucket_size": config.reduce_bucket_size,
            "allgather_bucket_size": config.allgather_bucket_size,
            "overlap_comm": config.overlap_comm,
            "contiguous_gradients": config.contiguous_gradients,
        }
        if config.zero_stage == 3:
            zero |= {
                "stage3_prefetch_bucket_size": config.prefetch_bucket_size,
                "stage3_param_persistence_threshold": config.param_persistence_threshold,
                "stage3_max_live_parameters": config.max_live_parameters,
                # Parameters that are reused within this distance stay, as in our engine.
                "stage3_max_reuse_distance": config.prefetch_bucket_size
                if config.reshard_after_forward
                else config.max_live_parameters,
            }
        return {
            "train_batch_size": workload.global_batch_size,
            "train_micro_batch_size_per_gpu": config.micro_batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps(workload.global_batch_size, ranks),
            "gradient_clipping": workload.gradient_clipping,
            "zero_optimization": zero,
            "steps_per_print": 10**9,
        }

    def train_step(self) -> StepReport:
        losses = []
        for batch in self.batches:
            loss = self.engine(**batch)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        norm = self.engine.get_global_grad_norm()  # at stage 0 DeepSpeed clips but returns no norm
        return StepReport(loss=float(torch.stack(losses).mean()), gradient_norm=None if norm is None else float(norm))

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors, and every tensor created since it was wrapped: DeepSpeed holds its own in many places."""
        yield from (("parameters", parameter.data) for parameter in self.module.parameters())
        yield from (("buffers", buffer) for buffer in self.module.buffers())
        yield from (("activations", value) for batch in self.batches for value in batch.values())
        yield from (("buffers", value) for address, value in live_storages().items() if address not in self._before)

    def close(self) -> None:
        self.engine.destroy()
        del self.engine, self.module


def build(
    name: str, context: RankContext, spec: ModelSpec, config: TrialConfig, workload: Workload, **settings: Any
) -> Contestant:
    """The contestant of this name on this rank, with `settings` that no knob of ours has."""
    if name == "native":
        return NativeEngine().build(context, spec, config, workload)
    return PEERS[name](context, spec, config, workload, **settings)


PEERS: dict[str, Callable[..., Contestant]] = {
    "ddp": DDP,
    "fsdp2": FSDP2,
    "fsdp2, root kept": partial(FSDP2, keeps_root=True),
    "fsdp2, prefetch": partial(FSDP2, keeps_root=True, prefetches=1),
    "fsdp2, prefetch beside": partial(FSDP2, keeps_root=True, prefetches=1, beside=True),
    "deepspeed": DeepSpeed,
    "deepspeed, a rank's reduces": partial(DeepSpeed, multi_rank_bucket=False),
}
"""Each engine, with several settings where these matter: the best of them counts."""


def contestants(config: TrialConfig, contest: str) -> tuple[str, ...]:
    """The engines of a contest: native first, DeepSpeed if it is installed.

    FSDP2 has no prefetch size, so it takes part only in contests that prefetch one block.
    """
    stage, kept = config.zero_stage, ("fsdp2", "fsdp2, prefetch", "fsdp2, prefetch beside")
    torch_peers: tuple[str, ...] = {0: ("ddp",), 1: (), 2: kept, 3: kept}[stage]
    if stage == 3 and config.reshard_after_forward:
        torch_peers = tuple(name for name in PEERS if name.startswith("fsdp2")) if contest == "stage 3" else ()
    # At stage 0 DeepSpeed's buckets have a fixed size, which is the knob's default.
    has_knob = stage > 0 or config.reduce_bucket_size == TrialConfig().reduce_bucket_size
    names = [name for name in PEERS if name == "deepspeed" or (name.startswith("deepspeed") and stage in (1, 2))]
    deepspeed = names if has_knob and importlib.util.find_spec("deepspeed") else []
    return ("native", *torch_peers, *deepspeed)


def live_storages() -> dict[int, Tensor]:
    """One tensor for each storage that Python can reach, by address."""
    gc.collect()
    found: dict[int, Tensor] = {}
    for value in gc.get_objects():
        if issubclass(type(value), Tensor):
            for tensor in (_local(value), _local(value.grad) if value.is_leaf and value.grad is not None else None):
                if tensor is not None and tensor.layout is torch.strided and tensor.device.type == "cpu":
                    with contextlib.suppress(RuntimeError):  # the compiler keeps tensors without memory
                        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return found


def _tagged(
    module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    for parameter in module.parameters():
        yield "parameters", _local(parameter)
        if parameter.grad is not None:
            yield "gradients", _local(parameter.grad)
    yield from (("buffers", buffer) for buffer in module.buffers())
    for state in optimizer.state.values():
        yield from (("optimizer_state", _local(value)) for value in state.values())
    for batch in batches:
        yield from (("activations", value) for value in batch.values())


def _local(value: Tensor) -> Tensor:
    return value.to_local().detach() if hasattr(value, "to_local") else value.detach()


def _deepspeed() -> Any:
    """DeepSpeed for the CPU, without the operators that it compiles at run time."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp(prefix="atbench-extensions-"))
    os.environ.setdefault("LOCAL_SIZE", str(dist.get_world_size()))
    import deepspeed  # type: ignore[import-not-found]

    # By its full name: the attribute `deepspeed.comm.torch` is torch itself. The shared-memory operator compiles, and would
    # bypass the link.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    return deepspeed
