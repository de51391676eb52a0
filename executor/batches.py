"""Training data: every layout gets the same global batch for a step, of text or documents, cut into micro-batches; with data
schedules shorter samples (curriculum), or fewer tokens in middle layers (random-LTD).
"""

import functools
import hashlib
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from executor.errors import DataError, FactoryError
from search_spaces.models.model import ModelSpec
from search_spaces.training.data_schedule import Rows, job_step, kept_at, rows_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

TEXT_BYTES = 8_000_000
"""Maximum number of bytes of text that are read; more than any trial uses."""

BatchFunction = Callable[[int, torch.Generator], Mapping[str, Tensor]]


class Data(Protocol):
    """Returns the whole global batch of a step, on the CPU: a dict of tensors whose first dimension is the sample."""

    def global_batch(self, step: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextData:
    """Bytes of real text as tokens (modulo the vocabulary size if it is below 256)."""

    text: Tensor
    """uint8, one-dimensional."""
    workload: Workload
    vocab_size: int

    def global_batch(self, step: int) -> dict[str, Tensor]:
        """`tokens` and `labels` [global batch, sequence], int64; labels are one token ahead."""
        length = self.workload.sequence_length
        generator = torch.Generator().manual_seed(_seed(self.workload.seed, step))
        starts = torch.randint(0, self.text.numel() - length, (self.workload.global_batch_size, 1), generator=generator)
        window = self.text[starts + torch.arange(length + 1)].long() % self.vocab_size
        return {"tokens": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryData:
    """Calls the user's `batch(micro_batch_size, generator)` for a whole global batch, so that layouts see the same samples."""

    batch: BatchFunction
    workload: Workload

    def global_batch(self, step: int) -> dict[str, Tensor]:
        """The result of the user's function.

        Raises:
            FactoryError: it is not a dict of tensors.
        """
        generator = torch.Generator().manual_seed(_seed(self.workload.seed, step))
        drawn = self.batch(self.workload.global_batch_size, generator)
        if not isinstance(drawn, Mapping) or not all(isinstance(value, Tensor) for value in drawn.values()):
            raise FactoryError("batch(micro_batch_size, generator) must return a dict of tensors; return {name: tensor}")
        return dict(drawn)


@functools.lru_cache(maxsize=1)
def read_text(path: str | None) -> Tensor:
    """Bytes of a file, of every file in a folder, or (None) of the installed standard library's sources, as uint8.

    Cached for the next trial of a warm process.

    Raises:
        DataError: the path does not exist or holds no text.
    """
    root = Path(path or sysconfig.get_path("stdlib"))
    if not root.exists():
        raise DataError(f"data_path: {root} does not exist; name a text file or a folder of them")
    pattern = "*.py" if path is None else "**/*"
    files = [root] if root.is_file() else sorted(file for file in root.glob(pattern) if file.is_file())
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            text += stream.read(TEXT_BYTES - len(text))
        if len(text) >= TEXT_BYTES:
            break
    if not text:
        raise DataError(f"data_path: {root} holds no text; name a text file or a folder of them")
    return torch.frombuffer(text, dtype=torch.uint8)


def text_data(workload: Workload, vocab_size: int) -> TextData:
    """The workload's text.

    Raises:
        DataError: it is shorter than one sample.
    """
    return TextData(text=long_text(workload), workload=workload, vocab_size=vocab_size)


def long_text(workload: Workload) -> Tensor:
    """`read_text` of the workload's path, checked for its length.

    Raises:
        DataError: there is no text, or less than one sample and its last label.
    """
    text = read_text(workload.data_path)
    if text.numel() <= workload.sequence_length + 1:
        raise DataError(
            f"data_path: {text.numel()} bytes of text are fewer than one sample of {workload.sequence_length} tokens; "
            "give more text or a smaller --sequence-length"
        )
    return text


def micro_batches(
    batch: Mapping[str, Tensor], *, rank: int, ranks: int, micro_batch_size: int, global_batch_size: int
) -> list[dict[str, Tensor]]:
    """This rank's micro-batches of a global batch. Each micro-batch gets tensors without the sample dimension whole."""
    stride = micro_batch_size * ranks
    firsts = range(rank * micro_batch_size, global_batch_size, stride)
    return [
        {
            name: value[first : first + micro_batch_size] if value.dim() and len(value) == global_batch_size else value
            for name, value in batch.items()
        }
        for first in firsts
    ]


def _seed(seed: int, step: int) -> int:
    digest = hashlib.sha256(f"data:{seed}:{step}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


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
    shifted = []
    for step in range(1, modules + 1):
        moved = torch.full_like(labels, NO_TARGET)
        moved[:, :-step] = labels[:, step:]
        if places is not None:
            moved[:, :-step].masked_fill_(places[:, step:] != places[:, :-step] + step, NO_TARGET)
        shifted.append(moved)
    return torch.stack(shifted, dim=-1)


def shortened(batch: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    """The first `length` tokens of every sample [samples, tokens]; later, longer lengths extend the same samples."""
    return {name: value[:, :length] for name, value in batch.items()}


def kept_tokens(config: TrialConfig, workload: Workload, spec: ModelSpec, step: int, device: torch.device) -> dict[str, Tensor]:
    """Layer -> sorted positions of the tokens that it processes in a step, int64; layers that process all are omitted.

    Every middle layer draws its own tokens in every step [Yao et al. 2022, Random-LTD, 3.1], the same for all samples of the
    step. They depend only on the seed, the step and the layer's number, so that they are the same in every layout and when a
    checkpointed layer is recomputed.
    """
    token_count = kept_at(config, workload, job_step(workload, step))
    if not config.random_ltd_start_tokens or token_count >= workload.sequence_length:
        return {}
    chosen = {}
    for layer in range(1, spec.num_layers - 1):
        digest = hashlib.sha256(f"random-ltd:{workload.seed}:{step}:{layer}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.randperm(workload.sequence_length, generator=generator)[:token_count]
        chosen[str(layer)] = drawn.sort().values.to(device)
    return chosen


def through_kept(block: nn.Module, x: Tensor, rotary: tuple[Tensor, ...] | None, positions: Tensor) -> Tensor:
    """Apply a block to the `positions` tokens of x [batch, tokens, hidden]; the others bypass it.

    Kept tokens stay in order, so that causality among them is that of the whole sequence, and rotations are those of their
    positions.
    """
    rows = None if rotary is None else tuple(table[positions] for table in rotary)
    return x.index_copy(1, positions, block(x.index_select(1, positions), rows))
