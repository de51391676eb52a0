"""Blocks as CUDA graphs (`cuda_graphs`): one of each block's forward and one of its backward, captured once and replayed."""

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from executor.engine import PrivatePool, RankContext
from executor.errors import EngineRefusalError
from search_spaces.models.model import Model
from search_spaces.rules.cuda_graphs import GRAPHS_MODEL, GRAPHS_REMEDY, graphs_problem
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

EAGER_STEPS = 2
"""Before the capture: in them libraries set themselves up, state is made, and a step's FLOPs are counted."""

Call = Callable[[Tensor], Any]


class Held(NamedTuple):
    """Device memory of the graphs, in bytes."""

    reserved: int
    """All that is set apart for them: what a replay writes in, it must find where it was."""
    allocated: int
    """Of it, what the allocator counts as allocated; to it, what only replays use is free."""


class Capture(ABC):
    """Makes graphs of callables, by the contract of `torch.cuda.make_graphed_callables`:

    1. Each callable is a module without hooks that takes one tensor. It is run a few times and then captured on a sample with
       the shape, the type and the `requires_grad` of every later input. Nothing in it may wait for the device, and parameters
       and whatever else it reads stay where they were.
    2. A call copies its input into the sample, replays, and gives out the same storage each time. So does backward with the
       gradients of the input and of every parameter: the next replay overwrites them.
    3. Callables run in the order of their capture, and backward through all of them comes before the first one runs again.
    """

    device_type: ClassVar[str]

    @abstractmethod
    def graph(self, calls: Sequence[nn.Module], samples: Sequence[Tensor]) -> Sequence[Call]:
        """Capture all of them, forward in this order and backward in the other, in one private pool."""

    @abstractmethod
    def held(self) -> Held:
        """The memory of what was captured."""


class CudaCapture(Capture):
    """The real one."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._pool: Any = None
        self._beside = 0
        """Bytes of the samples, and of the gradients that come into blocks: torch makes places for both outside of the pool."""

    def graph(self, calls: Sequence[nn.Module], samples: Sequence[Tensor]) -> Sequence[Call]:
        self._pool, self._beside = torch.cuda.graph_pool_handle(), 2 * sum(sample.nbytes for sample in samples)
        graphed = torch.cuda.make_graphed_callables(tuple(calls), tuple((sample,) for sample in samples), pool=self._pool)
        assert isinstance(graphed, tuple)
        return [one.forward for one in graphed if isinstance(one, nn.Module)]  # global hooks would meet the modules themselves

    def held(self) -> Held:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        own = [part for part in segments if tuple(part["segment_pool_id"]) == tuple(self._pool)]
        sizes = (sum(part[name] for part in own) + self._beside for name in ("total_size", "allocated_size"))
        return Held(*sizes)


@dataclass(frozen=True, slots=True)
class _Seen:
    """How a block was called."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    others: tuple[Any, ...]
    """What it gets beside the hidden state: tables, which are the same in every step."""


class BlockGraphs:
    """Runs blocks eagerly for `EAGER_STEPS`, and then by replaying their graphs.

    1. In eager steps the shape of each block's input is seen.
    2. Between two steps, when nothing is on its way, all blocks are captured: forward from the first to the last, backward from
       the last to the first, which is the order of every micro-batch. Thus they can share a pool: what one has finished with,
       another uses. The tables that blocks read (rotations) are kept, not copied for each replay.
    3. From then on a call replays. Without gradients (an evaluation) blocks run eagerly.

    A block's `forward` is replaced, not the block wrapped, so that hooks on the block (late gathers) and on parameters
    (gradient reduction) stay outside of graphs, and run at every replay. [Megatron-LM, CudaGraphManager]
    """

    def __init__(self, blocks: Sequence[nn.Module], capture: Capture) -> None:
        self.blocks, self._capture = blocks, capture
        self.seconds = 0.0
        """That the capture took."""
        self._plain = [block.forward for block in blocks]
        self._seen: dict[int, _Seen] = {}
        self._graphed: list[Call] = []
        for place, block in enumerate(blocks):
            block.forward = functools.partial(self._run, place)

    @property
    def captured(self) -> bool:
        """Whether blocks are replayed."""
        return bool(self._graphed)

    def capture(self) -> None:
        """Capture every block, where all have been called and none is captured yet. Call it between steps."""
        if self.captured or len(self._seen) < len(self.blocks):
            return
        began = time.perf_counter()
        seen = [self._seen[place] for place in range(len(self.blocks))]
        calls = [_Call(*parts) for parts in zip(self.blocks, self._plain, (one.others for one in seen), strict=True)]
        samples = [torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in seen]
        for sample, one in zip(samples, seen, strict=True):
            sample.requires_grad_(one.requires_grad)
        self._graphed = list(self._capture.graph(calls, samples))
        self.seconds += time.perf_counter() - began

    def pool(self) -> PrivatePool | None:
        """The memory that the graphs have to themselves. In it parameters' gradients have places of their own, which no other
        tensor ever gets: they count as gradients, the rest as activations. None: nothing is captured.
        """
        if not self.captured:
            return None
        held = self._capture.held()
        trained = [value for block in self.blocks for value in block.parameters() if value.requires_grad]
        gradients = min(sum(value.numel() * value.element_size() for value in trained), held.reserved)
        return PrivatePool(by_tag={"gradients": gradients, "activations": held.reserved - gradients}, allocated=held.allocated)

    def tables(self) -> Iterator[Tensor]:
        """What graphs read beside parameters and hidden states."""
        for one in self._seen.values():
            yield from (value for value in tree_leaves(one.others) if isinstance(value, Tensor))

    def close(self) -> None:
        """Let go of the graphs and of their memory."""
        for block, plain in zip(self.blocks, self._plain, strict=True):
            block.forward = plain
        self._graphed.clear()
        self._seen.clear()
        self.blocks, self._plain = [], []

    def _run(self, place: int, x: Tensor, *others: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain[place](x, *others)
        if not self._graphed:
            self._seen[place] = _Seen(x.shape, x.dtype, x.device, x.requires_grad, others)
            return self._plain[place](x, *others)
        wanted = self._seen[place]
        if (x.shape, x.dtype, x.requires_grad) != (wanted.shape, wanted.dtype, wanted.requires_grad):
            told = f"{tuple(x.shape)} of {x.dtype}, requires_grad={x.requires_grad}"
            raise RuntimeError(f"block {place} was captured for another input than {told}; set cuda_graphs=false")
        return self._graphed[place](x)


class _Call(nn.Module):
    """A block's forward as a callable of the hidden state alone, without the hooks on the block."""

    def __init__(self, block: nn.Module, plain: Callable[..., Any], others: tuple[Any, ...]) -> None:
        super().__init__()
        self.block, self._plain, self._others = block, plain, others

    def forward(self, x: Tensor) -> Any:
        return self._plain(x, *self._others)


def refuse_graphs(
    context: RankContext, model: Model, config: TrialConfig, workload: Workload, capture: type[Capture] = CudaCapture
) -> None:
    """Refuse a device that captures nothing, and blocks that are not the same in every step.

    Raises:
        EngineRefusalError: with the rule's name.
    """
    kind = context.device.type
    if config.cuda_graphs and kind != capture.device_type:
        problem = f"CUDA graphs are captured on CUDA devices alone, and this rank's is {kind}"
        raise EngineRefusalError("graphs-device", f"{problem}; set cuda_graphs=false, or train on CUDA devices")
    blocks = graphs_problem(config, model, workload)
    if blocks:
        raise EngineRefusalError(GRAPHS_MODEL, f"{blocks}; {GRAPHS_REMEDY}")
