"""Users' modules of different kinds, which `benchmarks.prediction.module_plans` predicts and measures."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = Callable[[int, torch.Generator], Mapping[str, Tensor]]
WIDTH, TOKENS, WORDS = 128, 64, 1000


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.output = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result: [size, tokens, width]."""
        size, tokens, width = x.shape
        parts = self.qkv(self.norm(x)).view(size, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.output(read.transpose(1, 2).reshape(size, tokens, width))
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    """A decoder, whose output projection may be the embedding table."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """The mean loss; `words` and `labels`: [size, tokens]."""
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Classifier(nn.Module):
    """Layers that end in classes."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean loss; `labels`: [size]."""
        return functional.cross_entropy(self.layers(x), labels)


class ConvBlock(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result: [size, channels, height, width]."""
        return x + self.two(functional.relu(self.norm(self.one(x))))


def mlp() -> tuple[nn.Module, Batch]:
    """A multi-layer perceptron."""
    sizes = (784, 512, 512, 512, 10)
    layers = [part for one, two in pairwise(sizes) for part in (nn.Linear(one, two), nn.ReLU())]
    return Classifier(nn.Sequential(*layers[:-1])), _vectors


def conv() -> tuple[nn.Module, Batch]:
    """A convolutional network."""
    blocks = nn.Sequential(*(ConvBlock(32) for _ in range(3)))
    layers = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), blocks, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32 * 64, 10))
    return Classifier(layers), _images


def decoder() -> tuple[nn.Module, Batch]:
    """A transformer."""
    return LanguageModel(), _words


def tied() -> tuple[nn.Module, Batch]:
    """A transformer whose output projection is its embedding table."""
    return LanguageModel(tied=True), _words


def deep() -> tuple[nn.Module, Batch]:
    """A transformer with many equal layers."""
    return LanguageModel(layers=9), _words


def unequal() -> tuple[nn.Module, Batch]:
    """A transformer whose layers look equal, and of which one in the middle computes more."""

    class Twice(Block):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x) if self.place == 4 else x)

    module = LanguageModel(layers=0)
    module.blocks.extend(Twice(place) for place in range(9))
    return module, _words


def frozen() -> tuple[nn.Module, Batch]:
    """A transformer of which only the last layers and the head are trained."""
    module = LanguageModel(layers=6)
    for part in (module.table, *module.blocks[:3]):
        part.requires_grad_(False)
    return module, _words


def reads_value() -> tuple[nn.Module, Batch]:
    """A module that reads the value of a tensor, so that its shapes do not determine what it does."""

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.mean().item() > 0 else -x

    return Classifier(nn.Sequential(nn.Linear(784, 10), Gate())), _vectors


def _words(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (size, TOKENS), generator=generator)
    return {"words": words, "labels": words.roll(-1, 1)}


def _vectors(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 784, generator=generator), "labels": torch.randint(0, 10, (size,), generator=generator)}


def _images(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(size, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 10, (size,), generator=generator),
    }
