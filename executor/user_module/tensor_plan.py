"""Tensor parallelism of a user's module: applies its plan to plain Linears and Embeddings."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from executor.errors import FactoryError
from executor.parallel.tensor import TensorParallel
from executor.user_module.factory import UserModule
from executor.user_module.plan import Style, fits, is_plain, matched

OUTPUTS, INPUTS = 0, 1
"""Dimensions of a Linear's weight. An Embedding's rows are also dimension 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the parameters were divided, by name."""

    split: Mapping[str, int]
    """Parameter -> the dimension that is sliced across ranks."""
    summands: frozenset[str]
    """Parameters that are whole on each rank; each rank holds a summand of their gradient."""


def tensor_divisor(user: UserModule) -> int:
    """The number that the tensor-parallel size must divide; 0: the plan divides nothing."""
    sizes = [_size(inner, style) for _, inner, style in _divided(user)]
    if not sizes:
        return 0
    return math.gcd(*sizes, *user.plan.divides, *(getattr(owner, name) for owner, name in _heads(user)))


def divide(user: UserModule, tensor: TensorParallel) -> Division:
    """Replace the module's weights by this rank's slices, and its forwards by ones with the necessary collectives.

    Raises:
        FactoryError: the plan names a module that is not a plain Linear or Embedding, or an attribute that is not an integer.
    """
    if tensor.size == 1:
        return Division(split={}, summands=frozenset())
    names = {id(parameter): name for name, parameter in user.module.named_parameters()}
    split: dict[str, int] = {}
    slices: dict[int, nn.Parameter] = {}
    for _, inner, style in list(_divided(user)):
        dimension = _weight_dimension(inner, style)
        biased = style is not Style.ROWWISE and inner.bias is not None
        for key in ("weight", "bias") if biased else ("weight",):
            whole = inner.get_parameter(key)
            split[names[id(whole)]] = dimension
            shard = whole.data.chunk(tensor.size, dim=dimension)[tensor.rank].clone()
            slices.setdefault(id(whole), nn.Parameter(shard, requires_grad=whole.requires_grad))
            setattr(inner, key, slices[id(whole)])
        inner.forward = _forward(inner, style, tensor)
    for owner, name in list(_heads(user)):
        setattr(owner, name, getattr(owner, name) // tensor.size)
    summands = (inner for _, inner, style in matched(user.module, user.plan) if style is Style.SUMMAND)
    return Division(split=split, summands=frozenset(names[id(value)] for inner in summands for value in inner.parameters()))


def _divided(user: UserModule) -> Iterator[tuple[str, nn.Module, Style]]:
    """The modules whose weights are cut. A shared weight is cut only if all its owners cut it along the same dimension."""
    divisible = [item for item in matched(user.module, user.plan) if item[2] is not Style.SUMMAND]
    for name, inner, style in divisible:
        if not is_plain(inner, style):
            raise FactoryError(
                f"{user.reference}: plan.tensor names {name}, a {type(inner).__name__}; "
                f"{style} divides a Linear, or rowwise an Embedding without max_norm"
            )
    cut = {inner: _weight_dimension(inner, style) for _, inner, style in divisible}
    owners: dict[int, set[int | None]] = {}
    for inner in user.module.modules():
        for parameter in inner.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(cut.get(inner))
    for name, inner, style in divisible:
        if len(owners[id(inner.weight)]) == 1:
            yield name, inner, style


def _weight_dimension(inner: nn.Module, style: Style) -> int:
    return INPUTS if style is Style.ROWWISE and not isinstance(inner, nn.Embedding) else OUTPUTS


def _size(inner: nn.Module, style: Style) -> int:
    return inner.get_parameter("weight").shape[_weight_dimension(inner, style)]


def _forward(inner: nn.Module, style: Style, tensor: TensorParallel) -> Callable[[Tensor], Tensor]:
    if isinstance(inner, nn.Embedding):
        return functools.partial(_look_up, inner, tensor)
    assert isinstance(inner, nn.Linear)
    if style is Style.ROWWISE:
        return functools.partial(_sum_inputs, inner, tensor)
    return functools.partial(_own_outputs, inner, tensor, style is Style.COLWISE_GATHER)


def _own_outputs(linear: nn.Linear, tensor: TensorParallel, gathers: bool, x: Tensor) -> Tensor:
    if tensor.overlaps:
        _, (outputs,) = tensor.multiply_columns(x, [linear.weight])
        outputs = outputs if linear.bias is None else outputs + linear.bias
    else:
        outputs = functional.linear(tensor.enter(x), linear.weight, linear.bias)
    return tensor.gather_features(outputs) if gathers else outputs


def _sum_inputs(linear: nn.Linear, tensor: TensorParallel, x: Tensor) -> Tensor:
    weight = linear.weight
    total = tensor.multiply_rows(x, weight) if tensor.overlaps else tensor.leave(functional.linear(x, weight))
    return total if linear.bias is None else total + linear.bias


def _look_up(table: nn.Embedding, tensor: TensorParallel, tokens: Tensor) -> Tensor:
    rows = table.weight.shape[0]
    first = tensor.rank * rows
    local_tokens = tokens - first
    elsewhere = (local_tokens < 0) | (local_tokens >= rows)
    padding = None if table.padding_idx is None or not first <= table.padding_idx < first + rows else table.padding_idx - first
    embedded = functional.embedding(local_tokens.masked_fill(elsewhere, 0), table.weight, padding)
    return tensor.leave(embedded.masked_fill(elsewhere[..., None], 0))


def _heads(user: UserModule) -> Iterator[tuple[nn.Module, str]]:
    """Owner and name of every integer attribute that is divided by the number of ranks."""
    for pattern in user.plan.heads:
        owner, _, name = pattern.rpartition(".")
        owners = [inner for path, inner in user.module.named_modules() if fits(owner, path)]
        if not owners or not all(isinstance(getattr(inner, name, None), int) for inner in owners):
            raise FactoryError(f"{user.reference}: plan.heads names {pattern!r}; name a whole number of a module of it")
        yield from ((inner, name) for inner in owners)
