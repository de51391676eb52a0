"""A user's module with a plan for tensor and pipeline parallelism: `benchmarks.correctness.user_model:factory`."""

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, TOKENS, BLOCKS = 64, 16, 4, 16, 4
REFERENCE = f"{__name__}:factory"
PLAN = {
    "tensor": {
        "blocks.*.attention.queries": "colwise",
        "blocks.*.attention.keys_values": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "blocks.*.attention.scale": "replicated_with_grad_allreduce",
        "table": "rowwise",
        "out": "colwise_gather_output",
    },
    "heads": ["blocks.*.attention.heads"],
    "blocks": "blocks",
}


class Scale(nn.Module):
    """One weight for each dimension of a head; every rank uses it for its own heads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Attention(nn.Module):
    """Attention with its number of heads as an attribute, as in many users' modules."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.queries, self.keys_values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale, self.out = Scale(WIDTH // HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        size, tokens, _ = x.shape
        query = self.scale(self.queries(x).view(size, tokens, self.heads, -1)).transpose(1, 2)
        key = self.keys_values(x).view(size, tokens, self.heads, -1).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(size, tokens, -1))
        return out


class Block(nn.Module):
    """A layer that returns a tuple, as Hugging Face's formerly did."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor]:
        x = x + self.dropout(self.attention(self.norm(x), mask))
        return (x + self.down(torch.tanh(self.up(x))),)


class UserModel(nn.Module):
    """Tied embeddings, a root parameter, a mask made by the root; the call returns an object with `.loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.bias.requires_grad_(False)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        x = self.table(tokens) + self.places
        for block in self.blocks:
            x = block(x, mask)[0]
        return _Output(nn.functional.cross_entropy(self.out(self.norm(x)).flatten(0, 1), labels.flatten()))


class _Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def batch(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random tokens."""
    drawn = torch.randint(0, VOCABULARY, (samples, TOKENS + 1), generator=generator)
    return {"tokens": drawn[:, :-1], "labels": drawn[:, 1:]}


def factory() -> tuple[nn.Module, object, dict[str, object]]:
    """The module, its batch function and its parallelism plan."""
    return UserModel(), batch, PLAN
