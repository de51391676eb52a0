"""Documents of a workload's lengths as training data: one to a row with padding behind it, or several packed into a row."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.data.batches import long_text
from search_spaces.documents import Rows, rows_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

PLACES = "places"
"""Entry of a packed batch: where in its document each token stands."""
NO_TARGET = -100
"""Label of padding, from which nothing is learned: what `cross_entropy` leaves out."""


@dataclass(frozen=True, kw_only=True)
class DocumentData:
    """Real text in documents of stated lengths. A document is the same text in every row that it is in.

    A pass meets every document once, in rows whose order is drawn anew for each pass; the next one follows without a gap. A
    document of n tokens has n targets as a whole sample has, the last of them the token after it in the text: never the first
    one of another document.
    """

    text: Tensor
    """uint8, one-dimensional."""
    workload: Workload
    vocab_size: int
    rows: Rows
    packed: bool

    def global_batch(self, step: int) -> dict[str, Tensor]:
        """`tokens` and `labels` [global batch, sequence], int64, labels one token ahead and `NO_TARGET` on padding; packed,
        also `places` [global batch, sequence], which begin anew with each document and with the padding behind the last."""
        size, length = self.workload.global_batch_size, self.workload.sequence_length
        rows = [self._row(step * size + place) for place in range(size)]
        documents = torch.tensor([document for row in rows for document in row])
        row_of = torch.repeat_interleave(torch.arange(size), torch.tensor([len(row) for row in rows]))
        lengths = torch.tensor(self.workload.document_lengths)[documents]
        before = lengths.cumsum(0) - lengths
        used = torch.zeros(size, dtype=torch.int64).index_add_(0, row_of, lengths)
        # Documents of all rows one after the other, and where in the batch and in the text each of their tokens is.
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

    def _row(self, place: int) -> Sequence[int]:
        """The documents of the row at a place of all passes."""
        turn, within = divmod(place, len(self.rows))
        return self.rows[_order(self.workload.seed, turn, len(self.rows))[within]]

    @functools.cached_property
    def _starts(self) -> Tensor:
        """Where in the text each document begins."""
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
def _order(seed: int, turn: int, rows: int) -> list[int]:
    """Of the rows in a pass over the data."""
    order: list[int] = torch.randperm(rows, generator=_generator(f"rows:{seed}:{turn}")).tolist()
    return order


def _generator(text: str) -> torch.Generator:
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
