"""Observes one forward and backward of a user's module: which modules are called, and where their parameters are read.

Stage 3 and activation checkpointing act when a module is called. A container whose parts are called one by one is never called,
nor is a module of which only the weight is read (`F.linear(x, layer.weight)`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.errors import FactoryError, one_line
from executor.parallel.checkpointing import checkpoint_blocks
from executor.user_module.plan import UserModule
from executor.user_module.survey import UndividedError, block_names, copies_to_run, loss_of, parameter_count
from search_spaces.models.model import ON_BLOCKS
from search_spaces.trial_config import TrialConfig

QUICK_RUN = 10_000_000
"""Largest module, in parameters, that runs on the CPU first: a few samples take less than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledBlocks:
    """What engines act on in a user's module. Names are those of `named_modules`."""

    units: tuple[str, ...]
    """The blocks that are called, or the called parts of one that is not: stage 3 gathers each when it is called."""
    outside: frozenset[str]
    """Parameters of units that are read at another time, by a caller or in the backward of a recomputation of the user's own.
    Like those of no unit, they are gathered with the whole module."""
    trains_only: bool
    """Whether the module returns no loss in evaluation mode."""
    refused_knobs: tuple[tuple[str, str], ...]
    """Knobs that would do nothing or fail, each with the reason."""

    @property
    def recomputes(self) -> bool:
        """Whether units are blocks, not single layers because only these are called."""
        return len(self.refused_knobs) < len(ON_BLOCKS)


def called_blocks(user: UserModule, batch: Mapping[str, Any]) -> CalledBlocks:
    """Run a copy of the module once, on the CPU or without data. The module is not changed.

    If it runs on neither, its blocks are assumed to be called, except containers, which cannot be.

    Raises:
        FactoryError: the plan does not name a container of blocks.
    """
    try:
        blocks = block_names(user.module, user.plan)
    except UndividedError as error:
        raise FactoryError(f"{user.reference}: {error}; name its ModuleList, or leave plan.blocks out") from error
    record = _recorded(user.module, batch)
    units = tuple(unit for block in blocks for unit in _called(user.module, block, record))
    parts = {name: user.module.get_submodule(name) for name in units}
    whole = any(name in blocks or any(True for _ in part.children()) for name, part in parts.items())
    refused = () if whole else tuple((knob, "it has no repeated blocks that it calls as modules") for knob in ON_BLOCKS)
    if record is None:
        return CalledBlocks(units=units, outside=frozenset(), trains_only=False, refused_knobs=refused)
    outside = frozenset(_misread(user.module, units, record))
    if whole and (problem := record.problem_of_recomputing(units)):
        refused = (("activation_checkpointing", f"its blocks do not run again as in forward ({problem})"),)
    return CalledBlocks(units=units, outside=outside, trains_only=record.trains_only, refused_knobs=refused)


class _BackwardEvent(Enum):
    LEFT = auto()
    """A module's forward ended."""
    ENTERED_BACKWARD = auto()
    """A gradient of a module's output is there."""
    READ = auto()
    """An operator reads a parameter."""


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The calls and reads of one forward and backward, in order. Modules and parameters are named."""

    def __init__(self, copied: Callable[[], tuple[nn.Module, Any]]) -> None:
        """`copied`: makes a copy of the module, and a batch for it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied, self.trains_only = copied, False
        self.module, self._batch = copied()
        self.called: set[str] = set()
        self.forward: list[tuple[str, tuple[str, ...]]] = []
        """Each parameter that is read in forward, and the modules that run then."""
        self.backward: list[tuple[_BackwardEvent, str, tuple[str, ...]]] = []
        self._running: list[str] = []
        self._in_backward = False
        self._parameters = {
            parameter.untyped_storage()._cdata: name for name, parameter in self.module.named_parameters() if parameter.numel()
        }

    def run(self) -> None:
        """Run in evaluation mode, as the first steps of a trial, or in training mode if that gives no loss.

        Raises:
            Exception: the module does not run.
        """
        names = {inner: name for name, inner in self.module.named_modules()}
        with ExitStack() as stack:
            for inner, name in names.items():
                stack.callback(inner.register_forward_pre_hook(self._enters(name)).remove)
                stack.callback(inner.register_forward_hook(self._leaves(name), always_call=True).remove)
            training = [inner for inner in names if inner.training]
            self._follow(self.module.eval())
            if not self.backward:
                for inner in training:
                    inner.training = True
                self.trains_only = True
                self._follow(self.module)

    def problem_of_recomputing(self, blocks: Sequence[str]) -> str:
        """Why the blocks cannot be checkpointed, in a clause; empty: they can."""
        module, batch = self.copied()
        checkpoint_blocks([module.get_submodule(name) for name in blocks], TrialConfig(activation_checkpointing="full"))
        try:
            loss = loss_of((module if self.trains_only else module.eval())(**batch))
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            return one_line(error).rstrip(".:")
        return ""

    def _follow(self, module: nn.Module) -> None:
        with torch.enable_grad(), self:
            self.forward.clear()
            try:
                loss = loss_of(module(**self._batch))
            except Exception:
                if self.trains_only:
                    raise
                return
            if loss is not None:
                self._in_backward = True
                loss.backward()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                name = self._parameters.get(leaf.untyped_storage()._cdata)
                if name is not None and self._in_backward:
                    self.backward.append((_BackwardEvent.READ, name, tuple(self._running)))
                elif name is not None:
                    self.forward.append((name, tuple(self._running)))
        return func(*args, **(kwargs or {}))

    def _enters(self, name: str) -> Any:
        def enter(_module: nn.Module, _inputs: object) -> None:
            self.called.add(name)
            self._running.append(name)

        return enter

    def _leaves(self, name: str) -> Any:
        def leave(_module: nn.Module, _inputs: object, output: object) -> None:
            while self._running and self._running.pop() != name:
                pass
            if self._in_backward:
                self.backward.append((_BackwardEvent.LEFT, name, ()))
            outputs = [tensor for tensor in output_tensors(output) if tensor.requires_grad]
            if outputs:
                event = (_BackwardEvent.ENTERED_BACKWARD, name, ())
                register_multi_grad_hook(outputs, lambda _: self.backward.append(event), mode="any")

        return leave


def output_tensors(output: object) -> list[Tensor]:
    """Tensors in a module's output: the output itself, those inside containers and plain objects, and `.loss`."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in output_tensors(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in output_tensors(value)]
    tensors = [tensor for value in getattr(output, "__dict__", {}).values() for tensor in output_tensors(value)]
    loss = loss_of(output)
    return [*tensors, *([] if loss is None else [loss])]


def _recorded(module: nn.Module, batch: Mapping[str, Any]) -> _Record | None:
    """None: the module does not run here. What runs on the meta device for the first time loads for seconds."""
    runs = copies_to_run(module, batch)
    for run in reversed(runs) if parameter_count(module) <= QUICK_RUN else runs:
        try:
            record = _Record(run)
            record.run()
        except Exception:
            continue
        return record
    return None


def _called(module: nn.Module, name: str, record: _Record | None) -> list[str]:
    """The module if it is called, else those of its parts that are."""
    inner = module.get_submodule(name)
    if not any(True for _ in inner.parameters()):
        return []
    is_called = not isinstance(inner, nn.ModuleList | nn.ModuleDict) if record is None else name in record.called
    if is_called:
        return [name]
    return [unit for child, _ in inner.named_children() for unit in _called(module, f"{name}.{child}", record)]


def _misread(module: nn.Module, units: Sequence[str], record: _Record) -> Iterator[str]:
    """The parameters of units that are read while they would not be gathered.

    A unit is whole while it is called, and in backward from the first gradient of its output until the next unit's; if it is
    called again in backward (the user's own checkpointing), until that call ends.
    """
    paths = {id(parameter): name for name, parameter in module.named_parameters()}
    owners: dict[str, set[str]] = {}
    for unit in units:
        for parameter in module.get_submodule(unit).parameters():
            owners.setdefault(paths[id(parameter)], set()).add(unit)
    for name, running in record.forward:
        if name in owners and owners[name].isdisjoint(running):
            yield name
    current: str | None = None
    for event, name, running in record.backward:
        if event is _BackwardEvent.ENTERED_BACKWARD and name in units:
            current = name
        elif event is _BackwardEvent.LEFT and name == current:
            current = None
        elif event is _BackwardEvent.READ and name in owners and owners[name].isdisjoint((*running, current)):
            yield name
