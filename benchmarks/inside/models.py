"""The small models, data and loops of these proofs, in float64."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 61


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inputs, self.outputs = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (samples, tokens, width)."""
        parts = self.inputs(self.norm(hidden)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.outputs(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(hidden)


class Language(nn.Module):
    """A small language model whose loss is the mean over the labels that are not -100."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def make_batches(count: int, rows: int, seed: int, ragged: bool, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Batches of this rank, with the number of each sample; `ragged`: samples have different numbers of labels."""
    draw = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(count):
        tokens = torch.randint(0, VOCABULARY, (rows, length), generator=draw)
        labels = tokens.clone()
        if ragged:
            lengths = torch.randint(2, length + 1, (rows,), generator=draw)
            labels[torch.arange(length) >= lengths[:, None]] = -100
        batches.append({"input_ids": tokens, "labels": labels, "ids": torch.arange(rows) + number * rows})
    return batches


def wrapped(model: nn.Module, wrapper: str) -> Any:
    """The model as a loop calls it."""
    if wrapper == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=1)
    if wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    return model


def plain_loop(model: Any, optimizer: Any, batches: list[Any], per_step: int, note: Callable[[float], None]) -> None:
    """The reference: each batch is a micro-batch, and its loss is divided by the number of batches in the step."""
    for start in range(0, len(batches), per_step):
        group = batches[start : start + per_step]
        optimizer.zero_grad()
        total = 0.0
        for number, batch in enumerate(group, 1):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = number == len(group)
            loss = model(batch["input_ids"], batch["labels"]) / len(group)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        note(total)


def full_weights(model: Any) -> list[torch.Tensor]:
    """All weights, on every rank."""
    return [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach() for parameter in model.parameters()
    ]


def start_ranks() -> random.Random:
    """Initialise the process group if there are several ranks."""
    import os

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    return random.Random(0)


def rank_number() -> int:
    """This rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def drawn(random_numbers: random.Random, values: list[Any]) -> Iterator[Any]:
    """Random values without an end."""
    while True:
        yield random_numbers.choice(values)
