"""Weights of another framework as ours, and back: names, and tensors that one of them keeps together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.errors import WeightsError
from search_spaces.models.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Together:
    """How one of their tensors is made of several of ours."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor, Sequence[int]], Sequence[Tensor]]
    """Takes the rows of each of ours."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One of their tensors."""

    theirs: str
    ours: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of each of ours; empty if they are equal."""
    together: Together | None = None
    """None: they are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """All tensors of a model in another framework."""

    weights: tuple[Weight, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    """Further names of some tensors -> their names in `weights`: written with them, and left out of what is read."""

    def ours(self, spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our weights, by the names of `Transformer.state_dict`, from theirs.

        Raises:
            WeightsError: a tensor is missing, or one is left, or a copy differs from its original.
        """
        own = {name: value for name, value in state.items() if name not in self.copies}
        _require_same(own, [weight.theirs for weight in self.weights], spec)
        for name, original in self.copies.items():
            if name in state and not torch.equal(state[name], state[original]):
                raise WeightsError(f"{name} differs from {original}, which the model shares: leave it out")
        found: dict[str, Tensor] = {}
        for weight in self.weights:
            tensor = state[weight.theirs]
            parts = [tensor] if weight.together is None else weight.together.split(tensor, weight.rows)
            found.update(zip(weight.ours, parts, strict=True))
        return found

    def theirs(self, spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `ours`."""
        _require_same(state, [name for weight in self.weights for name in weight.ours], spec)
        found: dict[str, Tensor] = {}
        for weight in self.weights:
            parts = [state[name] for name in weight.ours]
            found[weight.theirs] = parts[0] if weight.together is None else weight.together.join(parts)
        return found | {name: found[original] for name, original in self.copies.items()}


def _require_same(state: Mapping[str, Tensor], names: Sequence[str], spec: ModelSpec) -> None:
    # Tied tables have two names in a state_dict.
    tied = {"lm_head.weight", "head.output.weight"} if spec.tied_embeddings else set()
    missing, left = sorted(set(names) - set(state)), sorted(set(state) - set(names) - tied)
    if missing or left:
        problem = f"{missing[0]} is missing" if missing else f"{left[0]} is not one of its weights"
        raise WeightsError(f"{problem}: give the weights of a {spec.family} model of the shape of {spec.name}")


def _rows(tensor: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(tensor, list(rows))


ROWS = Together(join=lambda parts: torch.cat(list(parts)), split=_rows)
STACKED = Together(join=lambda parts: torch.stack(list(parts)), split=lambda tensor, _: tensor.unbind(0))
"""Matrices of all experts in one tensor [experts, rows, columns]."""


def rotated_halves(size: int, rotated: int) -> Together:
    """Heads of `size` rows, of which the last `rotated` are in pairs of neighbours in theirs, in two halves in ours.

    DeepSeek and Llama 4 rotate neighbours, we rotate halves.
    """

    def reordered(tensor: Tensor, pairs: tuple[int, int]) -> Tensor:
        heads = tensor.view(-1, size, *tensor.shape[1:])
        plain, last = torch.split(heads, [size - rotated, rotated], dim=1)
        turned = last.reshape(len(last), *pairs, *last.shape[2:]).transpose(1, 2).flatten(1, 2)
        return torch.cat((plain, turned), dim=1).flatten(0, 1)

    return Together(
        join=lambda parts: reordered(parts[0], (2, rotated // 2)),
        split=lambda tensor, _: [reordered(tensor, (rotated // 2, 2))],
    )


def pair(theirs: str, ours: str, bias: bool = False) -> Iterator[Weight]:
    """A tensor that is the same in both, and its bias."""
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Weight(f"{theirs}.{kind}", (f"{ours}.{kind}",))


def joined(theirs: str, ours: Sequence[str], rows: Sequence[int], bias: bool, together: Together) -> Iterator[Weight]:
    """Tensors that they keep together, and their biases."""
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Weight(f"{theirs}.{kind}", tuple(f"{name}.{kind}" for name in ours), tuple(rows), together)
