"""How a user's module may be divided: the plan of its factory, or the plan that a Hugging Face model declares."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import nn

from executor.errors import FactoryError

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
