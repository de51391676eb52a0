"""The Protocol of a factory, and the loading of a user's module inside a rank."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn
from torch.nn.parameter import is_lazy

from executor.batches import BatchFunction
from executor.errors import ExecutorError, FactoryError, one_line
from executor.user_module.huggingface import make_huggingface
from executor.user_module.plan import UserModule, own_plan, read_plan, require_modules
from search_spaces.models.huggingface import BUILT
from search_spaces.trial import Workload

LEAST_SAMPLES = 2
"""Samples of the batch that a module is examined with; some modules squeeze a batch of one sample."""


class Factory(Protocol):
    """The function that `module:factory` names. A call of the module with a batch returns the loss or an object with `.loss`.

    The optional third value is a plan (`executor.user_module.plan`) as a dict: where tensor and pipeline parallelism may cut
    the module.
    """

    def __call__(self) -> tuple[nn.Module, BatchFunction] | tuple[nn.Module, BatchFunction, Mapping[str, Any]]: ...


def load_factory(reference: str, workload: Workload) -> UserModule:
    """Import `module:factory`, call it, and check what it returns; `hf:CONFIG` builds a Hugging Face model for the workload.

    Raises:
        FactoryError: the message is one line with the remedy; the user's own error, if any, is its cause.
    """
    result = _make(reference, workload)
    if not (isinstance(result, tuple) and len(result) in (2, 3)):
        raise FactoryError(f"{reference} returned {type(result).__name__}; return the pair (module, batch)")
    module, batch = result[:2]
    if not isinstance(module, nn.Module):
        raise FactoryError(f"{reference} returned {type(module).__name__} as the module; return a torch.nn.Module first")
    if not callable(batch):
        raise FactoryError(f"{reference} returned {type(batch).__name__} as batch; return a function (size, generator) -> dict")
    for name, inner in module.named_modules():
        if any(is_lazy(parameter) for parameter in inner.parameters(recurse=False)):
            problem = f"its module {name} ({type(inner).__name__}) has no size before its first call"
            raise FactoryError(f"{reference}: {problem}; call the module once in the factory, on a batch")
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.sparse and inner.weight.requires_grad:
            problem = f"its module {name} ({type(inner).__name__}) has sparse gradients, which engines do not reduce"
            raise FactoryError(f"{reference}: {problem}; make it with sparse=False")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise FactoryError(f"{reference}: no parameter requires a gradient; return a module that can be trained")
    if len(result) == 2:
        return UserModule(reference=reference, module=module, batch=batch, plan=own_plan(module))
    plan = read_plan(result[2], reference)
    require_modules(plan, module, reference)
    return UserModule(reference=reference, module=module, batch=batch, plan=plan)


def _make(reference: str, workload: Workload) -> Any:
    if reference.startswith(BUILT):
        return _call(reference, lambda: make_huggingface(reference, workload), "give a config.json that transformers can build")
    return _call(reference, _find(reference), "fix the factory")


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
        raise FactoryError(f"{reference}: importing {name} raised {one_line(error)}; fix the module") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        problem = "has no" if factory is None else "cannot call its"
        file = getattr(module, "__file__", None) or name
        raise FactoryError(f"{reference}: {file} {problem} {attribute!r}; define a function of this name there")
    return factory  # type: ignore[no-any-return]


def _call(reference: str, factory: Callable[[], Any], remedy: str) -> Any:
    try:
        return factory()
    except ExecutorError:
        raise
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{reference} raised {one_line(error)}; {remedy}") from error
