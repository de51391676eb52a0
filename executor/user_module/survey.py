"""Observes how a module runs through its blocks, in one forward on the meta device, and cuts it into pipeline stages."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.batches import map_tensors
from executor.errors import FactoryError
from executor.user_module.plan import ParallelPlan

LARGEST_RUN = 200_000_000
"""Largest module, in parameters, that runs on the CPU if it fails on the meta device; this takes a few seconds."""


class UndividedError(Exception):
    """The module cannot be cut into stages; the message gives the reason in one clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The structure of a module, as a pipeline needs it. Names are those of `named_modules` and `named_parameters`."""

    blocks: tuple[str, ...]
    """In execution order; each block gets the output of the previous one."""
    starts: tuple[int, ...]
    """Blocks before which a stage may begin, the first one included."""
    before: frozenset[str]
    """Parameters that the first block's input depends on."""
    within: tuple[frozenset[str], ...]
    """Parameters of each block."""
    after: frozenset[str]
    """Parameters used between the last block's output and the loss."""
    hidden: Tensor
    """Hidden state on the meta device: shape and dtype of a block's output."""
    outputs: Mapping[str, Any]
    """Module with direct parameters that runs before the first block -> its output, on the meta device."""
    later: frozenset[str]
    """Modules with direct parameters that run after the last block and not before the first."""
    wrapped: bool
    """Whether a block returns the hidden state in a tuple."""

    @property
    def tied(self) -> frozenset[str]:
        """Parameters that the first and the last stage need."""
        return self.before & self.after


def survey(module: nn.Module, batch: Mapping[str, Any], plan: ParallelPlan) -> Survey:
    """Run a copy of the module once on `batch` and follow it through its blocks. The module is not changed.

    Raises:
        UndividedError: it cannot be cut into stages.
    """
    names = block_names(module, plan)
    if len(names) < 2:
        raise UndividedError("no blocks repeat in a ModuleList or Sequential of it")
    run = _DetachedForward(on_meta(module), names)
    try:
        return run.follow(map_tensors(batch, lambda value: value.to("meta")), plan)
    except UndividedError:
        raise
    except Exception as error:
        # Some modules read values, which meta tensors do not have.
        if parameter_count(module) > LARGEST_RUN:
            raise UndividedError(f"it does not run on the meta device ({type(error).__name__}: {error})") from error
    return _DetachedForward(copy.deepcopy(module), names).follow(batch, plan)


def block_names(module: nn.Module, plan: ParallelPlan) -> tuple[str, ...]:
    """The names of the blocks in order.

    Raises:
        UndividedError: the plan does not name a ModuleList or Sequential.
    """
    names = {inner: name for name, inner in module.named_modules()}
    if not plan.blocks:
        return tuple(names[block] for block in repeated_blocks(module))
    holder = next((inner for inner, name in names.items() if name == plan.blocks), None)
    if not isinstance(holder, nn.ModuleList | nn.Sequential):
        raise UndividedError(f"plan.blocks {plan.blocks!r} is not a ModuleList or Sequential of it")
    return tuple(f"{plan.blocks}.{name}" for name, _ in holder.named_children())


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of one class that occur at least twice in a ModuleList or Sequential, in order."""
    for child in model.children():
        entries = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        trainable = [entry for entry in entries if any(True for _ in entry.parameters())]
        if len(trainable) > 1 and len({type(entry) for entry in trainable}) == 1:
            siblings = [sibling for sibling in model.children() if sibling is not child]
            return [*trainable, *(block for sibling in siblings for block in repeated_blocks(sibling))]
    return [block for child in model.children() for block in repeated_blocks(child)]


def first_tensor(value: object) -> Tensor | None:
    """The value itself, or the first entry of a tuple or list, if that is a tensor."""
    first = value[0] if isinstance(value, tuple | list) and value else value
    return first if isinstance(first, Tensor) else None


NO_LOSS = "the module's call must return the loss (one number), an object with .loss or a dict with 'loss'"


def loss_of(output: object) -> Tensor | None:
    """The loss that a module returned: a tensor of one element, `.loss` or the entry `loss` of a dict."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def loss_from(output: object) -> Tensor:
    """The same.

    Raises:
        FactoryError: the output has no loss.
    """
    loss = loss_of(output)
    if loss is None:
        raise FactoryError(NO_LOSS)
    return loss


class _DetachedForward:
    """One forward in which each block's input is detached, so that autograd's graph shows which parameters produced it."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module, self.names = module, names
        self.blocks = [module.get_submodule(name) for name in names]
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        self.parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        self.made_by: list[frozenset[str]] = []
        self.returned: list[Tensor] = []
        self.outputs: dict[str, Any] = {}
        self.later: set[str] = set()
        self.wrapped = False
        self._next = 0

    def follow(self, batch: Mapping[str, Any], plan: ParallelPlan) -> Survey:
        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(block.register_forward_pre_hook(self._enter, with_kwargs=True))
                stack.enter_context(block.register_forward_hook(self._leave))
            for name, inner in self._others():
                stack.enter_context(inner.register_forward_hook(self._note(name)))
            loss = loss_of(self.module(**batch))
        if loss is None:
            raise UndividedError("its call returns no loss")
        if self._next != len(self.blocks):
            raise UndividedError(f"{len(self.blocks) - self._next} of its {len(self.blocks)} blocks do not run")
        self.made_by.append(frozenset(self._makers(loss)))
        return self._survey(plan)

    def _inside(self, block: str) -> frozenset[str]:
        """The parameters of a block, including those of branches that this batch did not take."""
        return frozenset(self.parameters[id(parameter)] for parameter in self.module.get_submodule(block).parameters())

    def _others(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules with direct parameters that neither are in a block nor contain one."""
        for name, inner in self.module.named_modules():
            path = f"{name}." if name else ""
            related = any(f"{block}.".startswith(path) or path.startswith(f"{block}.") for block in self.names)
            if not related and any(True for _ in inner.parameters(recurse=False)):
                yield name, inner

    def _survey(self, plan: ParallelPlan) -> Survey:
        before, *made_by_blocks, after = self.made_by
        within = [
            block_parameters | self._inside(name) for name, block_parameters in zip(self.names, made_by_blocks, strict=True)
        ]
        for name, block_parameters in zip(self.names, within, strict=True):
            elsewhere = sorted(block_parameters & (before | after))
            if elsewhere:
                raise UndividedError(f"its block {name} depends on {elsewhere[0]}, which is not the block's own")
        if any(first & other for first, other in itertools.combinations(within, 2)):
            raise UndividedError("its blocks share parameters")
        if len(before & after) > 1:
            raise UndividedError(f"several of its weights are at both ends: {', '.join(sorted(before & after))}")
        used = before.union(after, *within)
        idle = sorted(set(self.parameters.values()) - used)
        if idle:
            raise UndividedError(f"its parameter {idle[0]} has no part in the loss")
        return Survey(
            blocks=tuple(self.names), starts=_starts(self.names, plan), before=before, within=tuple(within), after=after,
            hidden=self.returned[0].to("meta"), outputs=self.outputs, later=frozenset(self.later - set(self.outputs)),
            wrapped=self.wrapped,
        )  # fmt: skip

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._next == len(self.blocks) or block is not self.blocks[self._next]:
            raise UndividedError("its blocks do not run once each, in order")
        hidden = first_tensor(args)
        if hidden is None or not hidden.is_floating_point():
            raise UndividedError(f"its block {self.names[self._next]} does not get the hidden state as its first argument")
        if self._next and hidden is not self.returned[-1]:
            raise UndividedError(f"what its block {self.names[self._next - 1]} returns is changed before the next one gets it")
        self.made_by.append(frozenset(self._makers(hidden)))
        return (hidden.detach().requires_grad_(), *args[1:]), kwargs

    def _leave(self, _block: nn.Module, _inputs: object, output: object) -> Any:
        hidden = first_tensor(output)
        if hidden is None or (self.returned and hidden.shape != self.returned[-1].shape):
            raise UndividedError(f"its block {self.names[self._next]} does not return a hidden state as the others do")
        self.wrapped = isinstance(output, tuple | list)
        self._next += 1
        if self._next < len(self.blocks):
            self.returned.append(hidden)
            return None
        # Detach, so that what follows the last block is not attributed to the block.
        self.made_by.append(frozenset(self._makers(hidden)))
        cut = hidden.detach().requires_grad_()
        self.returned.append(cut)
        return (cut, *output[1:]) if isinstance(output, tuple | list) else cut

    def _note(self, name: str) -> Any:
        def note(_module: nn.Module, _inputs: object, output: object) -> None:
            if not self._next:
                self.outputs[name] = output
            elif self._next == len(self.blocks):
                self.later.add(name)

        return note

    def _makers(self, value: Tensor) -> Iterator[str]:
        """The parameters that the value was computed from, back to where the graph was detached."""
        pending, visited = [value.grad_fn], set()
        if value.is_leaf and id(value) in self.parameters:
            yield self.parameters[id(value)]
        while pending:
            node = pending.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self.parameters:
                yield self.parameters[id(variable)]
            pending += [earlier for earlier, _ in node.next_functions]


def _starts(names: Sequence[str], plan: ParallelPlan) -> tuple[int, ...]:
    unknown = sorted(set(plan.split_points) - set(names))
    if unknown:
        raise UndividedError(f"plan.split_points names {unknown[0]!r}, which is not one of its blocks ({names[0]} …)")
    points = plan.split_points or names
    return tuple(sorted({0, *(names.index(name) for name in points)}))


def on_meta(module: nn.Module) -> nn.Module:
    """A copy on the meta device, without memory; tied parameters stay tied, frozen ones frozen."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def copies_to_run(module: nn.Module, batch: Mapping[str, Any]) -> list[Callable[[], tuple[nn.Module, Any]]]:
    """Functions that copy a module with a batch: to the meta device, where nothing is computed, and if the module is small with
    its values, which some modules read."""
    without_data = lambda: (on_meta(module), map_tensors(batch, lambda value: value.to("meta")))  # noqa: E731
    with_data = [lambda: (copy.deepcopy(module), batch)] if parameter_count(module) <= LARGEST_RUN else []
    return [without_data, *with_data]


def parameter_count(module: nn.Module) -> int:
    """Elements of the parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


class StageForward:
    """Replaces the forward of a stage's module.

    The user's forward runs unchanged, so that it creates its own masks, rotations and so on. Before the stage's blocks,
    modules with parameters return zeros and blocks return their input. The first block of the stage gets the hidden state
    that the previous stage sent. The block after the stage's last one ends the forward.
    """

    def __init__(self, module: nn.Module, enters: str, first: bool) -> None:
        self._whole, self._enters, self._first = module.forward, enters, first
        self._received: Tensor | None = None

    def __call__(self, entry: Tensor, **batch: Any) -> Tensor:
        """`entry`: the batch entry named `enters` on the first stage, else the hidden state of the previous stage."""
        self._received = None if self._first else entry
        try:
            output = self._whole(**{self._enters: entry, **batch} if self._first else batch)
        except _StageEndedError as ended:
            return ended.hidden
        finally:
            self._received = None
        return loss_from(output)

    def take_over(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-hook of the stage's first block: replaces its input by the received hidden state."""
        return (self._received, *args[1:]), kwargs


class _StageEndedError(Exception):
    """Raised to leave the user's forward at the end of the stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the stage has ended")
        self.hidden = hidden


def cut_stage(module: nn.Module, survey: Survey, blocks: Sequence[int], enters: str) -> list[nn.Module]:
    """Turn the module into one of its stages; return the stage's blocks.

    Call it while the parameters have their original names, and before anything but a tensor plan replaces a `forward`.
    """
    first, last = blocks[0] == 0, blocks[-1] == len(survey.blocks) - 1
    stage_parameters = survey.before if first else frozenset()
    stage_parameters = stage_parameters.union(survey.after if last else (), *(survey.within[block] for block in blocks))
    stage = StageForward(module, enters, first)
    mine = [module.get_submodule(survey.blocks[block]) for block in blocks]
    if not first:
        for name, output in survey.outputs.items():
            module.get_submodule(name).forward = functools.partial(_zeros_like, output)
        mine[0].register_forward_pre_hook(stage.take_over, with_kwargs=True)
    for block, name in enumerate(survey.blocks):
        if block < blocks[0]:
            module.get_submodule(name).forward = functools.partial(_pass_on, survey.wrapped)
        elif block == blocks[-1] + 1:
            module.get_submodule(name).forward = _end
    _drop(module, survey, stage_parameters)
    module.forward = stage
    return mine


def _zeros_like(output: Any, *args: Any, **kwargs: Any) -> Any:
    """Zeros in place of the tensors that the real module returns; only their shape is read."""
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if isinstance(output, Tensor):
        return torch.zeros(output.shape, dtype=output.dtype, device=None if tensor is None else tensor.device)
    if isinstance(output, tuple | list):
        return type(output)(_zeros_like(value, *args, **kwargs) for value in output)
    return output


def _pass_on(wrapped: bool, *args: Any, **_: Any) -> Any:
    return (args[0],) if wrapped else args[0]


def _end(*args: Any, **_: Any) -> Any:
    hidden = first_tensor(args)
    assert hidden is not None  # the survey has seen it
    raise _StageEndedError(hidden)


def _drop(module: nn.Module, survey: Survey, stage_parameters: frozenset[str]) -> None:
    """Remove the parameters of other stages. Those that the forward outside the blocks may read stay, frozen."""
    gone = {id(parameter) for name, parameter in module.named_parameters() if name not in stage_parameters}
    for name, inner in module.named_modules():
        idle = (
            name in survey.outputs
            or name in survey.later
            or any(f"{name}.".startswith(f"{block_name}.") for block_name in survey.blocks)
        )
        for key, parameter in list(inner.named_parameters(recurse=False)):
            if id(parameter) in gone and idle:
                inner.register_parameter(key, None)
            elif id(parameter) in gone:
                parameter.requires_grad_(False)
