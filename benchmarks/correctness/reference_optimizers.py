"""Optimizers in one process on whole parameters, written as in their papers: the reference for the engine's."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from search_spaces.optimizers import BETAS, EPSILON, LAMB_EPSILON, LEAST_QUANTISED, MUON_MOMENTUM, QUANTISED_BLOCK, SGD_MOMENTUM
from search_spaces.trial import Workload


def reference_optimizers(name: str, module: nn.Module, workload: Workload) -> list[Any]:
    """Optimizers to step in turn; torch's own where it exists."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    rates = {"lr": workload.learning_rate, "weight_decay": workload.weight_decay}
    match name:
        case "sgd":
            return [torch.optim.SGD(parameters, momentum=SGD_MOMENTUM, **rates)]
        case "lamb":
            return [Lamb(parameters, **rates)]
        case "adamw8bit":
            return [AdamW8bit(parameters, **rates)]
        case "muon":
            matrices = _matrices(module)
            rest = [parameter for parameter in parameters if id(parameter) not in {id(matrix) for matrix in matrices}]
            muon = torch.optim.Muon(matrices, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw", **rates)
            return [muon, torch.optim.AdamW(rest, **rates)] if rest else [muon]
        case _:
            return [torch.optim.AdamW(parameters, **rates)]


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """Matrices of our transformer's blocks, or of the module lists of a user's module. The projection of a module for
    multi-token prediction is outside of its block.
    """
    lists = [inner for inner in module.modules() if isinstance(inner, nn.ModuleList | nn.ModuleDict)]
    named = [pair for one in lists for pair in one.named_parameters() if not pair[0].endswith(".project.weight")]
    found = {id(value): value for _, value in named if value.dim() == 2 and value.requires_grad}
    return list(found.values())


class Lamb:
    """[You et al. 2020, algorithm 2], with the norm of the weights itself as the length of a step."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        self.parameters, self.lr, self.weight_decay, self.steps = [*parameters], lr, weight_decay, 0
        self.moments = [(torch.zeros_like(value.data), torch.zeros_like(value.data)) for value in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        one, two = BETAS
        for parameter, (first, second) in zip(self.parameters, self.moments, strict=True):
            gradient = _gradient(parameter)
            first.copy_(one * first + (1 - one) * gradient)
            second.copy_(two * second + (1 - two) * gradient**2)
            ratio = (first / (1 - one**self.steps)) / ((second / (1 - two**self.steps)).sqrt() + LAMB_EPSILON)
            update = ratio + self.weight_decay * parameter
            weights, updates = float(parameter.norm()), float(update.norm())
            parameter -= self.lr * (weights / updates if weights and updates else 1.0) * update

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class AdamW8bit(Lamb):
    """[Dettmers et al. 2022]: each moment as the nearest of 256 codes times the largest magnitude of its block."""

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        one, two = BETAS
        for parameter, (first, second) in zip(self.parameters, self.moments, strict=True):
            gradient = _gradient(parameter)
            first.copy_(one * first + (1 - one) * gradient)
            second.copy_(two * second + (1 - two) * gradient**2)
            corrected = (second / (1 - two**self.steps)).sqrt() + EPSILON
            parameter.mul_(1 - self.lr * self.weight_decay).sub_(self.lr * (first / (1 - one**self.steps)) / corrected)
            if parameter.numel() >= LEAST_QUANTISED:
                first.copy_(quantised(first, signed=True))
                second.copy_(quantised(second, signed=False))


def quantised(values: Tensor, signed: bool) -> Tensor:
    """The values rounded to an 8-bit code each and an fp32 scale a block, by trying every code."""
    codes = torch.tensor(sorted(_codes(signed)), dtype=torch.float32)
    exact = codes.double()  # in fp32 two distances may appear equal
    kept = []
    for block in values.flatten().split(QUANTISED_BLOCK):
        scale = block.abs().max().float()
        relative = (block / scale.clamp(min=torch.finfo(torch.float32).tiny)).float()
        nearest = (relative.double()[:, None] - exact[None, :]).abs().argmin(dim=1)
        kept.append(codes[nearest].to(block.dtype) * scale)
    return torch.cat(kept).view_as(values)


def _codes(signed: bool) -> Iterator[float]:
    """bitsandbytes' `create_dynamic_map` for 8 bits."""
    yield from (0.0, 1.0)
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        for part in range(parts):
            middle = (0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (decade - 6)
            yield from (middle, -middle) if signed else (middle,)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter.data) if parameter.grad is None else parameter.grad
