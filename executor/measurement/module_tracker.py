"""Tracks which module of a model is active at each moment of a step, and measures the time of each."""

import bisect
import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves


class Phase(StrEnum):
    """The kind of work that is being done."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OUTSIDE = "outside"
    """No module is active: the step is before forward, between forward and backward, or after backward."""
    PROFILER = "profiler"
    """The step is paused while the tracker installs its hooks."""


class ModulePhase(NamedTuple):
    """The active module and its phase."""

    module: int | None
    """Index into the model's `named_modules`."""
    phase: Phase


OUTSIDE = ModulePhase(None, Phase.OUTSIDE)


class ModuleTracker:
    """A context manager around a step that calls `moved` at each change of module or phase, at the moment of the change.

    1. **Forward.** Hooks surround every module's call: a module is active from its call to its return, except during the calls
       inside it. The first module that is called is the model.
    2. **Owners of backward nodes.** autograd numbers its nodes in the order in which forward creates them, so the number at
       each change of module or phase shows which module created a node. The graph's nodes get a hook when the model returns.
    3. **Backward.** From the start of a node on, the module that created it is active, until a node of another module starts.
       So each moment of backward belongs to one module, without gaps or overlaps. The accumulation and the reduction of
       parameter gradients have no number; they belong to the module whose node ran just before.
    4. **Recompute.** A module that is called while backward runs is being recomputed. What a checkpointed block does between
       the calls inside it cannot be distinguished from the backward work for which it runs.

    The tracker adds nothing to the graph, so results do not change. Used from one thread (and autograd's thread on its behalf).
    """

    def __init__(self, moved: Callable[[ModulePhase], None]) -> None:
        self.module_phase = OUTSIDE
        self.modules: list[tuple[str, nn.Module]] = []
        self.calls: list[int] = []
        self._moved = moved
        self._indices: dict[nn.Module, int] = {}
        self._before: list[ModulePhase] = []
        self._numbers: list[int] = []
        self._makers: list[int | None] = []
        self._handles: list[Any] = []
        self._in_backward = False

    def __enter__(self) -> "ModuleTracker":
        # always_call, because a checkpoint that has recomputed enough leaves the recomputed modules by an exception.
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _move(self, module_phase: ModulePhase) -> None:
        if module_phase != self.module_phase:
            self.module_phase = module_phase
            self._moved(module_phase)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if not self._indices:
            self.modules = list(module.named_modules())
            self._indices = {inner: index for index, (_, inner) in enumerate(self.modules)}
            self.calls = [0] * len(self.modules)
        index = self._indices.get(module)
        if index is None:
            return
        self._before.append(self.module_phase)
        if torch._C._current_graph_task_id() != -1:
            self._move(ModulePhase(index, Phase.RECOMPUTE))
            return
        self.calls[index] += 1
        self._note_maker(index)
        self._move(ModulePhase(index, Phase.FORWARD))

    def _leave_module(self, module: nn.Module, _: Any, output: Any) -> None:
        index = self._indices.get(module)
        if index is None:
            return
        before = self._before.pop()
        if self.module_phase.phase is Phase.FORWARD:
            self._note_maker(before.module)
            if index == 0:
                self._move(ModulePhase(None, Phase.PROFILER))
                self._hook_graph(output)
        self._move(before)

    def _note_maker(self, index: int | None) -> None:
        """Record that this module creates the nodes that are numbered from now on."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._makers.append(index)

    def _hook_graph(self, output: Any) -> None:
        """Hook every node that the model's call has created, then clear the record of node numbers."""
        waiting = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
        hooked: set[Node] = set()
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            # Outside the range are parameter nodes, which have the highest possible number, and nodes of earlier calls.
            if node in hooked or not self._numbers[0] <= number < self._numbers[-1]:
                continue
            hooked.add(node)
            maker = self._makers[bisect.bisect_right(self._numbers, number) - 1]
            node.register_prehook(functools.partial(self._enter_backward, maker))
            waiting += [parent for parent, _ in node.next_functions if parent is not None]
        self._numbers.clear()
        self._makers.clear()

    def _enter_backward(self, module: int | None, _: tuple[Tensor, ...]) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._leave_backward)
        self._move(ModulePhase(module, Phase.BACKWARD))

    def _leave_backward(self) -> None:
        self._in_backward = False
        self._move(OUTSIDE)


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output: in tuples, lists and dicts, and the `.loss` of an object."""
    leaves = (leaf if isinstance(leaf, Tensor) else getattr(leaf, "loss", None) for leaf in tree_leaves(output))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class ModuleClock:
    """Records the time at each change of module or phase; on CUDA by stream events: the device's time, not the host's.

    If the device waits for the host, the wait belongs to the module in which the host was late.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[ModulePhase, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """Start a step, outside the model."""
        self._marks.clear()
        self.move(OUTSIDE)

    def move(self, module_phase: ModulePhase) -> None:
        """Record that the step continues at `module_phase`."""
        self._marks.append((module_phase, self._now()))

    def stop(self) -> dict[ModulePhase, float]:
        """End the step. Return the seconds of each module and phase; their sum is the step's."""
        self.move(OUTSIDE)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: defaultdict[ModulePhase, float] = defaultdict(float)
        for (module_phase, began), (_, ended) in itertools.pairwise(self._marks):
            seconds[module_phase] += _between(began, ended)
        return dict(seconds)

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(began: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    """Return the seconds between two marks of the same device."""
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert not isinstance(ended, float)
    return float(began.elapsed_time(ended)) / 1e3
