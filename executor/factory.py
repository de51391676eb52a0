"""A module of the user's own: the Protocol of a factory, and how it is loaded inside a rank."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from executor.errors import FactoryError

Batch = Callable[[int, torch.Generator], Mapping[str, Any]]
"""`batch(micro_batch_size, generator)`: the keyword arguments that the module is called with."""


class Factory(Protocol):
    """What `module:factory` names. Calling the module with a batch gives the loss, or an object with `.loss`."""

    def __call__(self) -> tuple[nn.Module, Batch]: ...


def load_factory(reference: str) -> tuple[nn.Module, Batch]:
    """Import `module:factory`, call it, and check what it returns.

    Raises:
        FactoryError: the message is one line with the remedy; the user's own error, if there is one, is its cause.
    """
    made = _call(reference, _find(reference))
    if not (isinstance(made, tuple) and len(made) == 2):
        raise FactoryError(f"{reference} returned {type(made).__name__}; return the pair (module, batch)")
    module, batch = made
    if not isinstance(module, nn.Module):
        raise FactoryError(f"{reference} returned {type(module).__name__} as the module; return a torch.nn.Module first")
    if not callable(batch):
        raise FactoryError(f"{reference} returned {type(batch).__name__} as batch; return a function (size, generator) -> dict")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise FactoryError(f"{reference}: no parameter requires a gradient; return a module that can be trained")
    return module, batch


def _find(reference: str) -> Factory:
    name, colon, attribute = reference.partition(":")
    if not (name and colon and attribute):
        raise FactoryError(f"{reference!r} names no factory; write it as module:factory")
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            remedy = "run in the folder that holds it, or put that folder on PYTHONPATH"
            raise FactoryError(f"{reference}: there is no module {error.name!r}; {remedy}") from None
        raise FactoryError(f"{reference}: importing {name} raised {_named(error)}; fix the module") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        problem = "has no" if factory is None else "cannot call its"
        where = getattr(module, "__file__", None) or name
        raise FactoryError(f"{reference}: {where} {problem} {attribute!r}; define a function of this name there")
    return factory  # type: ignore[no-any-return]


def _call(reference: str, factory: Factory) -> Any:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{reference} raised {_named(error)}; fix the factory") from error


def _named(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
