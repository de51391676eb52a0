"""A module of your own: `autotune sweep examples.my_model:build` from the repository's root."""

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """A residual MLP over 64 features and 10 classes. Its repeated blocks are what ZeRO stage 3 gathers together."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(6))
        self.leave = nn.Linear(256, 10)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        x = self.enter(features)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.leave(x), labels)


def batch(micro_batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What the module is called with: drawn from the generator alone, so that every configuration sees the same samples."""
    features = torch.randn(micro_batch_size, 64, generator=generator)
    return {"features": features, "labels": features[:, :10].argmax(dim=1)}


def build() -> tuple[nn.Module, object]:
    """The factory: the module, and what makes its batches."""
    return Classifier(), batch
