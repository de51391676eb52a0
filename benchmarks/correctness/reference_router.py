"""The loads of experts and the bias that follows them, on one process in plain PyTorch, for comparison with the engine's."""

from functools import partial

import torch
from torch import Tensor, nn

from executor.parallel.experts import Experts
from search_spaces.models.model import ModelSpec


class ReferenceBalance:
    """After a step each router's bias goes up by `rate` for experts with less than the mean load, and down for those with more
    [DeepSeek-AI 2024, DeepSeek-V3, 2.1.2]. Routers are those of DeepSeek-V3: sigmoids, in groups ranked by their best two."""

    def __init__(self, module: nn.Module, rate: float) -> None:
        self._rate = rate
        layers = _biased(module) if rate else []
        self._biases = [layer.correction for layer in layers if layer.correction is not None]
        self._loads = [torch.zeros(layer.spec.num_experts) for layer in layers]
        self.watch(module)

    def watch(self, module: nn.Module) -> None:
        """Count the loads of this module too, and give it the biases."""
        for place, layer in enumerate(_biased(module) if self._rate else []):
            layer.correction = self._biases[place]
            layer.router.register_forward_hook(partial(self._count, place, layer.spec))

    def step(self) -> None:
        """Move the biases by the loads since the last step."""
        for bias, loads in zip(self._biases, self._loads, strict=True):
            mean = float(loads.mean())
            for expert, load in enumerate(loads.tolist()):
                bias[expert] += self._rate * ((mean > load) - (mean < load))
            loads.zero_()

    @torch.no_grad()
    def _count(self, place: int, spec: ModelSpec, _router: nn.Module, _inputs: object, scores: Tensor) -> None:
        for token in (scores.sigmoid() + self._biases[place]).flatten(0, -2):
            groups = token.view(spec.router_groups, -1)
            best = groups.topk(min(2, groups.shape[1])).values.sum(1).topk(spec.router_groups_kept).indices
            kept = torch.full_like(groups, float("-inf"))
            kept[best] = groups[best]
            for expert in kept.flatten().topk(spec.experts_per_token).indices.tolist():
                self._loads[place][expert] += 1


def _biased(module: nn.Module) -> list[Experts]:
    return [layer for layer in module.modules() if isinstance(layer, Experts) and layer.correction is not None]
