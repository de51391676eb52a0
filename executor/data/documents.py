"""Training data of documents with the workload's lengths: one document per row with padding after it, or several packed."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.data.batches import long_text
from search_spaces.training.documents import Rows, rows_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

PLACES = "places"
"""Entry of a packed batch: the position of each token in its document."""
NO_TARGET = -100
"""Label of padding; the default `ignore_index` of `cross_entropy`."""


@dataclass(frozen=True, kw_only=True)
class DocumentData:
    """Real text cut into documents of given lengths. A document has the same text in every row that contains it.

    Each pass uses every document once, in a new random order of rows, and the next pass follows without a gap. Like a whole
    sample, a document of n tokens has n targets. The last target is the token that follows in the text, never the first
    token of another document.
    """

    text: Tensor
    """uint8, one-dimensional."""
    workload: Workload
    vocab_size: int
    rows: Rows
    packed: bool

    def global_batch(self, step: int) -> dict[str, Tensor]:
        """`tokens` and `labels` [global batch, sequence], int64; labels are one token ahead, and `NO_TARGET` on padding.
        Packed batches add `places` [global batch, sequence], which restart at each document and at the final padding."""
        size, length = self.workload.global_batch_size, self.workload.sequence_length
        rows = [self._row(step * size + index) for index in range(size)]
        documents = torch.tensor([document for row in rows for document in row])
        row_of = torch.repeat_interleave(torch.arange(size), torch.tensor([len(row) for row in rows]))
        lengths = torch.tensor(self.workload.document_lengths)[documents]
        before = lengths.cumsum(0) - lengths
        used = torch.zeros(size, dtype=torch.int64).index_add_(0, row_of, lengths)
        # Concatenate the documents of all rows; compute the position of each token in the batch and in the text.
        places = torch.arange(int(lengths.sum())) - torch.repeat_interleave(before, lengths)
        first = before + row_of * length - (used.cumsum(0) - used)[row_of]
        target = torch.repeat_interleave(first, lengths) + places
        source = torch.repeat_interleave(self._starts[documents], lengths) + places
        tokens, labels = torch.zeros(size * length, dtype=torch.int64), torch.full((size * length,), NO_TARGET)
        tokens[target], labels[target] = (self.text[source + ahead].long() % self.vocab_size for ahead in range(2))
        batch = {"tokens": tokens.view(size, length), "labels": labels.view(size, length)}
        if self.packed:
            padding = (torch.arange(length) - used[:, None]).clamp_(min=0)
            batch[PLACES] = padding.view(-1).index_copy_(0, target, places).view(size, length)
        return batch

    def _row(self, index: int) -> Sequence[int]:
        """The documents of row `index`, counted over all passes."""
        epoch, within = divmod(index, len(self.rows))
        return self.rows[_order(self.workload.seed, epoch, len(self.rows))[within]]

    @functools.cached_property
    def _starts(self) -> Tensor:
        """Offset of each document in the text [tokens]."""
        generator = _generator(f"documents:{self.workload.seed}")
        last = self.text.numel() - self.workload.sequence_length
        return torch.randint(0, last, (len(self.workload.document_lengths),), generator=generator)


def document_data(config: TrialConfig, workload: Workload, vocab_size: int) -> DocumentData:
    """The workload's documents, cut out of its text.

    Raises:
        DataError: the text is shorter than one row.
    """
    rows = rows_of(config, workload)
    return DocumentData(
        text=long_text(workload), workload=workload, vocab_size=vocab_size, rows=rows, packed=config.pack_sequences
    )


def useful_tokens(batch: Mapping[str, Tensor]) -> int:
    """Tokens of a batch that have a target."""
    return int((batch["labels"] != NO_TARGET).sum())


@functools.lru_cache(maxsize=8)
def _order(seed: int, epoch: int, rows: int) -> list[int]:
    """Order of the rows in one pass over the data."""
    order: list[int] = torch.randperm(rows, generator=_generator(f"rows:{seed}:{epoch}")).tolist()
    return order


def _generator(text: str) -> torch.Generator:
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
