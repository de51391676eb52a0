"""A user's module with a branch that only some samples, and so only some ranks, take:
`benchmarks.correctness.branch_model:factory`."""

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, TOKENS = 61, 16, 16
REFERENCE = f"{__name__}:factory"


class BranchBlock(nn.Module):
    """A layer with a branch that only flagged samples take: on most ranks its parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, flagged: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.trunk(x))
        rows = torch.where(flagged)[0]
        return out.index_add(0, rows, self.branch(out[rows])) if rows.numel() else out


class BranchModel(nn.Module):
    """Repeated blocks and a root parameter; the call returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(BranchBlock() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor, flagged: Tensor) -> Tensor:
        x = self.table(tokens) * self.scale
        for block in self.blocks:
            x = block(x, flagged)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def batch(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random tokens; the first sample is flagged."""
    drawn = torch.randint(0, VOCABULARY, (samples, TOKENS + 1), generator=generator)
    return {"tokens": drawn[:, :-1], "labels": drawn[:, 1:], "flagged": torch.arange(samples) == 0}


def factory() -> tuple[nn.Module, object]:
    """The module and its batch function, as an engine expects them."""
    return BranchModel(), batch
