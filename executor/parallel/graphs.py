"""How blocks run: compiled by torch.compile, or captured once as CUDA graphs (`cuda_graphs`) and then replayed."""

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import calculate_time_spent
from torch.utils._pytree import tree_leaves

from executor.engine import PrivatePool, RankContext
from executor.errors import EngineRefusalError
from executor.parallel.checkpointing import CheckpointedForward
from executor.parallel.experts import Experts
from search_spaces.models.model import Model
from search_spaces.rules.computation import GRAPHS_MODEL, GRAPHS_REMEDY, graphs_problem
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

SELECTIVE_REMEDY = "set compile_blocks=false, or activation_checkpointing to none or full"
EAGER_STEPS = 2
"""Steps before the capture, in which libraries initialize, state is allocated and a step's FLOPs are counted."""

Call = Callable[[Tensor], Any]


class Held(NamedTuple):
    """Device memory of the graphs, in bytes."""

    reserved: int
    """All memory reserved for them, since replays write to fixed addresses."""
    allocated: int
    """The part that the allocator counts as allocated; it counts memory that only replays use as free."""


class Capture(ABC):
    """Captures graphs of callables, with the contract of `torch.cuda.make_graphed_callables`:

    1. Each callable is a module without hooks that takes one tensor. It runs a few times and is then captured on a sample with
       the shape, dtype and `requires_grad` of all later inputs. Nothing in it may wait for the device, and parameters and
       everything else that it reads must keep their addresses.
    2. A call copies its input to the sample, replays, and returns the same storage each time. Backward does the same with the
       gradients of the input and of every parameter; the next replay overwrites them.
    3. Callables run in the order of their capture, and backward runs through all of them before the first one runs again.
    """

    device_type: ClassVar[str]

    @abstractmethod
    def graph(self, calls: Sequence[nn.Module], samples: Sequence[Tensor]) -> Sequence[Call]:
        """Capture all of them, forward in this order and backward in reverse, in one private pool."""

    @abstractmethod
    def held(self) -> Held:
        """The memory of the captured graphs."""


class CudaCapture(Capture):
    """Captures with torch's CUDA graphs."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._pool: Any = None
        self._static_bytes = 0
        """Bytes of the samples and of the incoming gradients of blocks, which torch allocates outside the pool."""

    def graph(self, calls: Sequence[nn.Module], samples: Sequence[Tensor]) -> Sequence[Call]:
        self._pool, self._static_bytes = torch.cuda.graph_pool_handle(), 2 * sum(sample.nbytes for sample in samples)
        graphed = torch.cuda.make_graphed_callables(tuple(calls), tuple((sample,) for sample in samples), pool=self._pool)
        assert isinstance(graphed, tuple)
        return [
            module.forward for module in graphed if isinstance(module, nn.Module)
        ]  # a call of the module would run global hooks

    def held(self) -> Held:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        segments_of_pool = [part for part in segments if tuple(part["segment_pool_id"]) == tuple(self._pool)]
        sizes = (sum(part[name] for part in segments_of_pool) + self._static_bytes for name in ("total_size", "allocated_size"))
        return Held(*sizes)


@dataclass(frozen=True, slots=True)
class _BlockInput:
    """Properties of a block's input."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    further_inputs: tuple[Any, ...]
    """Arguments after the hidden state: tables, which are the same in every step."""


class BlockGraphs:
    """Runs blocks eagerly for `EAGER_STEPS`, and then replays their graphs.

    1. Eager steps record the shape of each block's input.
    2. Between two steps, when nothing is in flight, all blocks are captured: forward from first to last, backward from last to
       first, the order of every micro-batch. So they can share a pool, in which one block reuses the memory that another no
       longer needs. The tables that blocks read (rotations) are kept, not copied for each replay.
    3. From then on a call replays. Without gradients (evaluation) blocks run eagerly.

    A block's `forward` is replaced, instead of wrapping the block, so that hooks on the block (late gathers) and on parameters
    (gradient reduction) stay outside the graphs and run at every replay. [Megatron-LM, CudaGraphManager]
    """

    def __init__(self, blocks: Sequence[nn.Module], capture: Capture) -> None:
        self.blocks, self._capture = blocks, capture
        self.seconds = 0.0
        """Duration of the capture."""
        self._plain = [block.forward for block in blocks]
        self._inputs: dict[int, _BlockInput] = {}
        self._graphed: list[Call] = []
        for index, block in enumerate(blocks):
            block.forward = functools.partial(self._run, index)

    @property
    def captured(self) -> bool:
        """Whether blocks have been captured and are replayed."""
        return bool(self._graphed)

    def capture(self) -> None:
        """Capture every block, if all have been called and none is captured yet. Call it between steps."""
        if self.captured or len(self._inputs) < len(self.blocks):
            return
        began = time.perf_counter()
        inputs = [self._inputs[index] for index in range(len(self.blocks))]
        calls = [
            _HiddenStateForward(*parts)
            for parts in zip(self.blocks, self._plain, (block_input.further_inputs for block_input in inputs), strict=True)
        ]
        samples = [torch.zeros(block_input.shape, dtype=block_input.dtype, device=block_input.device) for block_input in inputs]
        for sample, block_input in zip(samples, inputs, strict=True):
            sample.requires_grad_(block_input.requires_grad)
        self._graphed = list(self._capture.graph(calls, samples))
        for call in calls:
            call.forget_graph()
        self.seconds += time.perf_counter() - began

    def pool(self) -> PrivatePool | None:
        """The private memory of the graphs; None: nothing is captured. Parameters' gradients have fixed addresses in it, which
        are never reused: they count as gradients, the rest as activations.
        """
        if not self.captured:
            return None
        pool_size = self._capture.held()
        trained = [value for block in self.blocks for value in block.parameters() if value.requires_grad]
        gradients = min(sum(value.numel() * value.element_size() for value in trained), pool_size.reserved)
        return PrivatePool(
            by_tag={"gradients": gradients, "activations": pool_size.reserved - gradients}, allocated=pool_size.allocated
        )

    def tables(self) -> Iterator[Tensor]:
        """The tensors that graphs read, other than parameters and hidden states."""
        for block_input in self._inputs.values():
            yield from (value for value in tree_leaves(block_input.further_inputs) if isinstance(value, Tensor))

    def close(self) -> None:
        """Release the graphs and their memory."""
        for block, plain in zip(self.blocks, self._plain, strict=True):
            block.forward = plain
        self._graphed.clear()
        self._inputs.clear()
        self.blocks, self._plain = [], []

    def _run(self, index: int, x: Tensor, *further_inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain[index](x, *further_inputs)
        if not self._graphed:
            self._inputs[index] = _BlockInput(x.shape, x.dtype, x.device, x.requires_grad, further_inputs)
            return self._plain[index](x, *further_inputs)
        captured = self._inputs[index]
        if (x.shape, x.dtype, x.requires_grad) != (captured.shape, captured.dtype, captured.requires_grad):
            actual = f"{tuple(x.shape)} of {x.dtype}, requires_grad={x.requires_grad}"
            raise RuntimeError(f"block {index} was captured for another input than {actual}; set cuda_graphs=false")
        return self._graphed[index](x)


class _HiddenStateForward(nn.Module):
    """A block's forward as a callable of only the hidden state, without the hooks on the block."""

    def __init__(self, block: nn.Module, plain: Callable[..., Any], further_inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.block, self._plain, self._further_inputs = block, plain, further_inputs
        self._results: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        result = self._plain(x, *self._further_inputs)
        self._results = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        return result

    def forget_graph(self) -> None:
        """Drop the autograd graph of the capture, which a replay does not use. It would keep the parameters' AccumulateGrad
        nodes, which stay on the stream of the capture: backward would then wait twice for every gradient.
        """
        for value in self._results:
            if value.grad_fn is not None and not value._is_view():
                value.detach_()
        self._results = []


def refuse_graphs(
    context: RankContext, model: Model, config: TrialConfig, workload: Workload, capture: type[Capture] = CudaCapture
) -> None:
    """Refuse a device that cannot capture graphs, and blocks that are not the same in every step.

    Raises:
        EngineRefusalError: with the name of the violated rule.
    """
    kind = context.device.type
    if config.cuda_graphs and kind != capture.device_type:
        problem = f"CUDA graphs can be captured only on CUDA devices, and this rank's device is {kind}"
        raise EngineRefusalError("graphs-device", f"{problem}; set cuda_graphs=false, or train on CUDA devices")
    blocks = graphs_problem(config, model, workload)
    if blocks:
        raise EngineRefusalError(GRAPHS_MODEL, f"{blocks}; {GRAPHS_REMEDY}")


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block's forward separately, as torchtitan does: identical blocks share the graph of the first.

    A block's `forward` is replaced, instead of wrapping the block, so that hooks on the block (stage-3 gathers) stay outside.
    """
    # In this process: the ranks of a host compile the same code concurrently, and compile workers would outlive the trial.
    torch._inductor.config.compile_threads = 1
    for block in blocks:
        # The numbers of rows that other ranks send are sizes in a graph; users' modules keep torch's default.
        torch._dynamo.config.capture_dynamic_output_shape_ops |= any(isinstance(part, Experts) for part in block.modules())
        checkpointed = block.forward if isinstance(block.forward, CheckpointedForward) else None
        block.forward = torch.compile(block.forward) if checkpointed is None else _compiled_around(checkpointed)


def _compiled_around(checkpointed: CheckpointedForward) -> Callable[..., Any]:
    """The compiled forward with its recomputation. What is compiled around a checkpoint computes only what backward needs.

    torch would run a checkpointed block that is not one graph uncompiled. Instead, the parts of such a block are compiled,
    inside the checkpoint.

    Raises, from the returned function:
        EngineRefusalError: a selectively checkpointed block is not one graph.
    """
    run = torch.compile(checkpointed.__call__, fullgraph=True)

    def forward(*inputs: Any, **keywords: Any) -> Any:
        nonlocal run
        try:
            return run(*inputs, **keywords)
        except Unsupported as problem:  # raised before anything has run
            if checkpointed.selective:
                raise EngineRefusalError(
                    "compile-selective",
                    f"a selectively checkpointed block is not one graph ({problem.msg}); {SELECTIVE_REMEDY}",
                ) from problem
            run = checkpointed.around(torch.compile(checkpointed.forward))
            return run(*inputs, **keywords)

    return forward


def compile_seconds() -> float:
    """Seconds spent compiling since `forget_compiled`."""
    return float(calculate_time_spent().get("total_wall_time", 0.0))


def forget_compiled() -> None:
    """Discard the compiled code of a closed model: beyond a number of variants, torch runs a function uncompiled."""
    torch._dynamo.reset()
    torch._dynamo.config.capture_dynamic_output_shape_ops = False
