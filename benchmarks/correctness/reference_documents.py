"""Documents in plain PyTorch, one at a time: the reference for packed and padded rows."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from executor.batches import NO_TARGET, PLACES
from executor.parallel.model import Transformer

Document = tuple[Tensor, Tensor]
"""Tokens and labels."""


def documents_loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean loss over all targets of a batch; the module processes its documents one at a time, as samples of their length."""
    if not isinstance(module, Transformer):
        raise TypeError("documents need our own model")
    whole, losses, count = module.sequence_length, [], 0
    for tokens, labels in documents_of(batch):
        module.set_length(len(tokens))
        losses.append(module(tokens[None], labels[None]) * len(tokens))
        count += len(tokens)
    module.set_length(whole)
    return torch.stack(losses).sum() / count


def documents_of(batch: Mapping[str, Tensor]) -> Iterator[Document]:
    """The documents of a global batch, row by row, without padding."""
    for place, (tokens, labels) in enumerate(zip(batch["tokens"], batch["labels"], strict=True)):
        starts = (batch[PLACES][place] == 0).nonzero().flatten().tolist() if PLACES in batch else [0]
        for first, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            used = labels[first:end] != NO_TARGET
            if used.any():
                yield tokens[first:end][used], labels[first:end][used]
