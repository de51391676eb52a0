"""The plan by which a user's module is divided, of its factory or of a Hugging Face model, and tensor parallelism by it."""

import fnmatch
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from executor.batches import BatchFunction
from executor.errors import FactoryError
from executor.parallel.tensor import TensorParallel

KEYS = ("tensor", "heads", "blocks", "split_points")


class Style(StrEnum):
    """The part of a module that a tensor-parallel rank holds; the names are those of Hugging Face's tensor-parallel plans."""

    COLWISE = "colwise"
    """A slice of a Linear's outputs; the outputs stay divided."""
    COLWISE_GATHER = "colwise_gather_output"
    """A slice of a Linear's outputs; the outputs are gathered."""
    ROWWISE = "rowwise"
    """A slice of a Linear's inputs or of an Embedding's rows; the ranks' results are summed."""
    SUMMAND = "replicated_with_grad_allreduce"
    """The whole module, applied to this rank's heads only; the ranks' gradients are summed."""


_STYLES = {
    "colwise_rep": Style.COLWISE_GATHER,
    "embedding_rowwise": Style.ROWWISE,
    "vocab_rowwise": Style.ROWWISE,
    **{style.value: style for style in Style},
}
"""Every accepted name of a style, aliases included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """Where a module can be cut. Names are those of `named_modules`; `*` matches any one component of a name."""

    tensor: Mapping[str, Style] = field(default_factory=dict)
    """Name of a Linear or an Embedding -> its style. Empty: tensor-parallel ranks have nothing to divide."""
    heads: tuple[str, ...] = ()
    """Names of integer attributes that are divided by the number of ranks, such as `layers.*.attention.num_heads`."""
    blocks: str = ""
    """Name of the ModuleList or Sequential of the blocks; empty: the outermost repeated modules."""
    split_points: tuple[str, ...] = ()
    """Names of the blocks before which a pipeline stage may begin; empty: before each."""
    divides: tuple[int, ...] = ()
    """Numbers that the tensor-parallel size must divide, in addition to the sizes of the divided weights."""
    skipped: tuple[str, ...] = ()
    """Names in the module's own plan that this product does not divide; every rank holds them whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModule:
    """The checked result of a factory."""

    reference: str
    module: nn.Module
    batch: BatchFunction
    plan: ParallelPlan


def read_plan(plan: Any, reference: str) -> ParallelPlan:
    """Read the plan that a factory returned after module and batch.

    Raises:
        FactoryError: it is not a mapping of `KEYS`, or a value is invalid.
    """
    if not isinstance(plan, Mapping) or not set(plan) <= set(KEYS):
        unexpected = f"{sorted(map(str, set(plan) - set(KEYS)))}" if isinstance(plan, Mapping) else type(plan).__name__
        raise FactoryError(f"{reference}: its plan has {unexpected}; return a dict of some of {', '.join(KEYS)}")
    tensor = plan.get("tensor", {})
    if not isinstance(tensor, Mapping) or not all(isinstance(name, str) for name in tensor):
        raise FactoryError(f"{reference}: plan.tensor is a {type(tensor).__name__}; give a dict of module name -> style")
    unknown = {str(style) for style in tensor.values()} - set(_STYLES)
    if unknown:
        styles = ", ".join(_STYLES)
        raise FactoryError(f"{reference}: plan.tensor has the style {sorted(unknown)[0]!r}; use one of {styles}")
    blocks = plan.get("blocks", "")
    if not isinstance(blocks, str):
        raise FactoryError(f"{reference}: plan.blocks is a {type(blocks).__name__}; give the name of one ModuleList")
    return ParallelPlan(
        tensor={name: _STYLES[str(style)] for name, style in tensor.items()},
        heads=_names(plan, "heads", reference),
        blocks=blocks,
        split_points=_names(plan, "split_points", reference),
    )


def require_modules(plan: ParallelPlan, module: nn.Module, reference: str) -> None:
    """Refuse a tensor plan with a name that matches no module: the intended module would stay whole next to divided ones.

    Raises:
        FactoryError: the plan has such a name.
    """
    names = [name for name, _ in module.named_modules()]
    for pattern in plan.tensor:
        if not any(fits(pattern, name) for name in names):
            remedy = "give a name of named_modules(), * for any one part of it"
            raise FactoryError(f"{reference}: plan.tensor names {pattern!r}, which no module of it has; {remedy}")


def own_plan(module: nn.Module) -> ParallelPlan:
    """The plan that a Hugging Face model declares (`tp_plan`); empty for any other module.

    A module stays whole if its style is unknown or the module is not plain (`is_plain`). Its siblings stay whole too, because
    they may rely on its divided result. The result of an Embedding is whole in either case, so its siblings are not affected.
    """
    plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return ParallelPlan()
    unsupported: set[str] = set()
    lookups: set[str] = set()
    for name, style in plan.items():
        inners = [inner for path, inner in module.named_modules() if fits(name, path)]
        if style in _STYLES and (_STYLES[style] is Style.SUMMAND or all(is_plain(inner, _STYLES[style]) for inner in inners)):
            continue
        is_lookup = style in _STYLES and all(isinstance(inner, nn.Embedding) for inner in inners)
        (lookups if is_lookup else unsupported).add(name)
    owners = {name.rpartition(".")[0] for name in unsupported} | unsupported
    siblings = {name for name in plan if any(name == owner or name.startswith(f"{owner}.") for owner in owners if owner)}
    skipped = unsupported | lookups | siblings
    tensor_styles = {name: _STYLES[style] for name, style in plan.items() if name not in skipped}
    config = getattr(module, "config", None)
    heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    divides = tuple(number for number in heads if isinstance(number, int))
    return ParallelPlan(tensor=tensor_styles, divides=divides, skipped=tuple(sorted(skipped)))


def is_plain(inner: nn.Module, style: Style) -> bool:
    """Whether a slice of the module computes a slice of its result: a Linear, or with rowwise an Embedding, with torch's
    forward."""
    forward = type(inner).forward
    plain = forward is nn.Linear.forward or (forward is nn.Embedding.forward and style is Style.ROWWISE)
    return plain and getattr(inner, "max_norm", None) is None


def matched(module: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, nn.Module, Style]]:
    """Every module that the plan divides, with its style, in the module's order."""
    for name, inner in module.named_modules():
        style = next((style for pattern, style in plan.tensor.items() if fits(pattern, name)), None)
        if style is not None:
            yield name, inner, style


def fits(pattern: str, name: str) -> bool:
    """Whether the name matches the pattern, component by component."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch.fnmatchcase, parts, pattern_parts))


def _names(plan: Mapping[str, Any], key: str, reference: str) -> tuple[str, ...]:
    names = plan.get(key, ())
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise FactoryError(f"{reference}: plan.{key} is not a list of names; give a list such as ['layers.2']")
    return tuple(names)


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
