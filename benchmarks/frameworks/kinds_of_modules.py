"""Modules as people write them, each a factory `benchmarks.frameworks.kinds_of_modules:NAME`, small, without a plan.

They need only torch. Modules of libraries are in `benchmarks.prediction.library_modules`.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, TOKENS, WORDS = 32, 12, 64
Made = tuple[nn.Module, Callable[[int, torch.Generator], Mapping[str, Any]]]


def words(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random tokens [size, TOKENS] as inputs and labels."""
    tokens = torch.randint(WORDS, (size, TOKENS), generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


class Language(nn.Module):
    """Embedding, a subclass's `body`, and a head over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(self.embedding(tokens))).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


def called() -> Made:
    """Blocks that are called: the usual way."""

    class Called(Language):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Called(), words


def lists_of_lists() -> Made:
    """A ModuleList of ModuleLists, whose parts are called one by one."""

    class Lists(Language):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(WIDTH), Block()]) for _ in range(3))

        def body(self, x: Tensor) -> Tensor:
            for norm, block in self.layers:  # type: ignore[misc]
                x = x + block(norm(x))
            return x

    return Lists(), words


def attributes() -> Made:
    """Weights that are read from outside of their modules, which are never called."""

    class Attributes(Language):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def body(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + functional.linear(functional.gelu(x), layer.weight, layer.bias)  # type: ignore[arg-type]
            return x

    return Attributes(), words


def gain_outside() -> Made:
    """Blocks that are called, and a parameter of each that the caller reads."""

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(WIDTH))

    class Gains(Language):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaled() for _ in range(3))

        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) * block.gain
            return x

    return Gains(), words


def encoder() -> Made:
    """torch's own encoder: attention reads the weight of its output projection, copies are made by deepcopy."""

    class Encoder(Language):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def body(self, x: Tensor) -> Tensor:
            return self.encoder(x)  # type: ignore[no-any-return]

    return Encoder(), words


def tied() -> Made:
    """The embedding is the head, read from another module; the last block reads it too."""

    class Reading(Block):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + functional.softmax(x @ self.table.weight.T, -1) @ self.table.weight

    class Tied(Language):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embedding.weight
            self.blocks = nn.ModuleList(Reading(self.embedding) for _ in range(3))

        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Tied(), words


def parametrized() -> Made:
    """Weight normalisation through torch.nn.utils.parametrize."""
    module, batch = called()
    for inner in list(module.modules()):
        if isinstance(inner, Block):
            nn.utils.parametrizations.weight_norm(inner.up)
            nn.utils.parametrizations.orthogonal(inner.down)
    return module, batch


def repeated() -> Made:
    """One block that runs three times."""

    class Repeated(Language):
        def __init__(self) -> None:
            super().__init__()
            self.group = nn.ModuleList([Block(), Block()])

        def body(self, x: Tensor) -> Tensor:
            for _ in range(3):
                for block in self.group:
                    x = block(x)
            return x

    return Repeated(), words


def by_methods() -> Made:
    """Parts that are called by another method than forward, with in-batch negatives."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.scale = nn.Parameter(torch.tensor(2.0))

        def encode(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return functional.normalize(x, dim=-1)

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList([Towers(), Towers()])

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            left, right = self.towers
            scores = left.encode(image) @ right.encode(text).T * left.scale.exp()  # type: ignore[operator,union-attr]
            return functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    return Contrast(), lambda size, generator: {
        "image": torch.randn(size, WIDTH, generator=generator), "text": torch.randn(size, WIDTH, generator=generator),
    }  # fmt: skip


def padded() -> Made:
    """Supervised fine-tuning: another number of targets in each sample, padded to the longest of the micro-batch."""

    def batch(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        lengths = torch.randint(2, TOKENS, (size, 1), generator=generator)
        tokens = torch.randint(WORDS, (size, int(lengths.max())), generator=generator)
        return {"tokens": tokens, "labels": tokens.masked_fill(torch.arange(tokens.shape[1]) >= lengths, -100)}

    return called()[0], batch


def noise() -> Made:
    """Random numbers in forward."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            drawn = torch.randn_like(x)
            return functional.mse_loss(self.blocks(x + drawn), drawn)

    return Denoiser(), lambda size, generator: {"x": torch.randn(size, WIDTH, generator=generator)}


def time_first() -> Made:
    """A recurrent layer with the time as first dimension, and a packed batch."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, 1)

        def forward(self, packed: nn.utils.rnn.PackedSequence, target: Tensor) -> Tensor:
            outputs, _ = nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0])
            return functional.mse_loss(self.head(outputs.sum(0)).squeeze(-1), target)

    def batch(size: int, generator: torch.Generator) -> dict[str, Any]:
        lengths = torch.randint(1, TOKENS, (size,), generator=generator)
        samples = torch.randn(int(lengths.max()), size, WIDTH, generator=generator)
        packed = nn.utils.rnn.pack_padded_sequence(samples, lengths, enforce_sorted=False)
        return {"packed": packed, "target": torch.randn(size, generator=generator)}

    return Recurrent(), batch


def nested() -> Made:
    """DETR-like: images, a list of dicts with another number of boxes for each, an absent mask; an object as output."""

    @dataclasses.dataclass(slots=True)
    class Detected:
        loss: Tensor
        boxes: Tensor

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Conv2d(3, WIDTH, 4, 4)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.boxes = nn.Linear(WIDTH, 4)

        def forward(self, images: Tensor, targets: list[dict[str, Tensor]], mask: Tensor | None) -> Detected:
            x = self.backbone(images).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            boxes = self.boxes(x)
            assert mask is None
            losses = [
                functional.l1_loss(found[: len(one["boxes"])], one["boxes"]) for found, one in zip(boxes, targets, strict=True)
            ]
            return Detected(loss=torch.stack(losses).mean(), boxes=boxes)

    def batch(size: int, generator: torch.Generator) -> dict[str, Any]:
        counts = torch.randint(1, 4, (size,), generator=generator).tolist()
        targets = [{"boxes": torch.rand(count, 4, generator=generator)} for count in counts]
        return {"images": torch.rand(size, 3, 8, 8, generator=generator), "targets": targets, "mask": None}

    return Detector(), batch


def loss_in_training_only() -> Made:
    """A module that returns predictions in evaluation mode, with BatchNorm."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, 4)
            )

        def forward(self, x: Tensor, y: Tensor) -> Any:
            scores = self.layers(x)
            return functional.cross_entropy(scores, y) if self.training else {"scores": scores}

    return Classifier(), lambda size, generator: {
        "x": torch.randn(size, WIDTH, generator=generator), "y": torch.randint(4, (size,), generator=generator),
    }  # fmt: skip


def cached_in_evaluation() -> Made:
    """Attention biases that evaluation mode computes once, with the graph of the first forward (as LeViT)."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.bias = nn.Parameter(torch.zeros(WIDTH))
            self.cache: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.training or self.cache is None:
                self.cache = self.bias.exp()
            for layer in self.layers:
                x = layer(x + self.cache)
            return x.square().mean()

    return Biased(), lambda size, generator: {"x": torch.randn(size, WIDTH, generator=generator)}


def bags_of_rows() -> Made:
    """DLRM-like: bags of indices into several tables, an interaction."""

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(50, WIDTH, mode="sum") for _ in range(6))
            self.top = nn.Linear(WIDTH + 21, 1)
            self.bottom = nn.Linear(4, WIDTH)

        def forward(self, dense: Tensor, bags: list[tuple[Tensor, Tensor]], clicks: Tensor) -> Tensor:
            x = self.bottom(dense)
            rows = torch.stack([x, *(table(*bag) for table, bag in zip(self.tables, bags, strict=True))], 1)
            upper = torch.triu_indices(7, 7, 1, device=rows.device)
            products = (rows @ rows.transpose(1, 2))[:, upper[0], upper[1]]
            scores = self.top(torch.cat([x, products], 1)).squeeze(1)
            return functional.binary_cross_entropy_with_logits(scores, clicks)

    def batch(size: int, generator: torch.Generator) -> dict[str, Any]:
        bags = [(torch.randint(50, (3 * size,), generator=generator), torch.arange(0, 3 * size, 3)) for _ in range(6)]
        dense, clicks = torch.randn(size, 4, generator=generator), torch.randint(2, (size,), generator=generator).float()
        return {"dense": dense, "bags": bags, "clicks": clicks}

    return Recommender(), batch


def teacher() -> Made:
    """A frozen copy that the trained part imitates, called without gradients."""

    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(Block(), Block())
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x) + x
            return functional.mse_loss(self.student(x), target)

    return Distilled(), lambda size, generator: {"x": torch.randn(size, WIDTH, generator=generator)}


def moving_teacher() -> Made:
    """A copy that follows the trained part a little in each forward."""

    class Following(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(Block(), Block())
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x) + x
                for mean, value in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mean.lerp_(value, 0.01)
            return functional.mse_loss(self.student(x), target)

    return Following(), lambda size, generator: {"x": torch.randn(size, WIDTH, generator=generator)}


def own_checkpointing() -> Made:
    """Blocks that the module itself recomputes."""

    class Recomputed(Language):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    return Recomputed(), words


def in_bf16() -> Made:
    """A module in bf16."""
    module, batch = called()
    return module.to(torch.bfloat16), batch


def trained_next_to_bf16() -> Made:
    """Frozen bf16 blocks with trained fp32 adapters, as PEFT makes them."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16).requires_grad_(False)
            self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.base(x.to(torch.bfloat16)).float() + self.adapter(x)

    class Adapting(Language):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Adapted() for _ in range(3))

        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Adapting(), words


WRITTEN = (
    called, lists_of_lists, attributes, gain_outside, encoder, tied, parametrized, repeated, by_methods, padded, noise,
    time_first, nested, loss_in_training_only, cached_in_evaluation, bags_of_rows, teacher, moving_teacher, own_checkpointing,
    in_bf16, trained_next_to_bf16,
)  # fmt: skip
"""All factories."""
