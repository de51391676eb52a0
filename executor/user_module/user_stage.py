"""A pipeline stage of a user's module: the module itself, in which only the stage's blocks compute anything."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.errors import FactoryError
from executor.user_module.survey import Survey, first_tensor, loss_of


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
        loss = loss_of(output)
        if loss is None:
            raise FactoryError("the module's call must return the loss (one number) or an object with .loss")
        return loss

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
