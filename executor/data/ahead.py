"""Labels further ahead than the next token, for multi-token prediction."""

from dataclasses import dataclass

import torch
from torch import Tensor

from executor.data.batches import Data
from executor.data.documents import NO_TARGET, PLACES

AHEAD = "ahead"
"""Entry of a batch: the labels of later tokens (`labels_ahead`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAhead:
    """Data with the labels that modules for multi-token prediction need. They are taken from whole samples, so that a rank that
    trains on a part of each has those of its tokens.
    """

    data: Data
    modules: int

    def global_batch(self, step: int) -> dict[str, Tensor]:
        """The batch, and `ahead` [global batch, sequence, modules], int64."""
        batch = self.data.global_batch(step)
        return {**batch, AHEAD: labels_ahead(batch["labels"], self.modules, batch.get(PLACES))}


def labels_ahead(labels: Tensor, modules: int, places: Tensor | None = None) -> Tensor:
    """[batch, tokens, modules] from `labels` [batch, tokens]: element k has the label of the token k + 1 positions later, and
    `NO_TARGET` where that token is not of the same sample, or of the same document by its `places` [batch, tokens].
    """
    found = []
    for step in range(1, modules + 1):
        moved = torch.full_like(labels, NO_TARGET)
        moved[:, :-step] = labels[:, step:]
        if places is not None:
            moved[:, :-step].masked_fill_(places[:, step:] != places[:, :-step] + step, NO_TARGET)
        found.append(moved)
    return torch.stack(found, dim=-1)
