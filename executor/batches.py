"""Training data: every layout gets the same micro-batches for a step, of text or documents or from a user's factory; with data
schedules shorter samples (curriculum), or fewer tokens in middle layers (random-LTD).
"""

import copy
import dataclasses
import functools
import hashlib
import random
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from executor.errors import DataError, FactoryError
from search_spaces.models.model import ModelSpec
from search_spaces.training.data_schedule import Rows, job_step, kept_at, rows_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

TEXT_BYTES = 8_000_000
"""Maximum number of bytes of text that are read; more than any trial uses."""

BatchFunction = Callable[[int, torch.Generator], Mapping[str, Any]]
"""`batch(micro_batch_size, generator)` returns the keyword arguments for a call of a user's module."""


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
        generator = _generator(f"data:{self.workload.seed}:{step}")
        starts = torch.randint(0, self.text.numel() - length, (self.workload.global_batch_size, 1), generator=generator)
        window = self.text[starts + torch.arange(length + 1)].long() % self.vocab_size
        return {"tokens": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryData:
    """Calls the user's `batch(micro_batch_size, generator)` once for each micro-batch.

    The samples depend on the seed, the step, the number of the micro-batch in the step and its size. So all layouts with one
    micro-batch size train on the same samples; with another size they are others.
    """

    batch: BatchFunction
    seed: int

    def micro_batch(self, step: int, index: int, size: int) -> dict[str, Any]:
        """The result of the user's function: keyword arguments of any type, on the device where the function made them.

        Raises:
            FactoryError: it is not a dict of keyword arguments.
        """
        number = forward_seed(self.seed, step, index)
        seed_generators(number)  # for a function that also uses the global generators
        drawn = self.batch(size, torch.Generator().manual_seed(number))
        if not isinstance(drawn, Mapping) or not all(isinstance(name, str) for name in drawn):
            raise FactoryError(
                f"batch(micro_batch_size, generator) returned {type(drawn).__name__}; return the keyword arguments of the "
                "module's call as a dict {name: value}"
            )
        return dict(drawn)


def rank_batches(
    source: FactoryData | Mapping[str, Tensor], step: int, *, rank: int, ranks: int, size: int, count: int
) -> list[dict[str, Any]]:
    """The `count` micro-batches of `size` samples that a data-parallel rank trains on in a step: of all micro-batches of the
    step, those with number rank, rank + ranks, … `source`: a factory's data, or the global batch of the step."""
    indices = range(rank, count * ranks, ranks)
    if isinstance(source, FactoryData):
        return [source.micro_batch(step, index, size) for index in indices]
    return [{name: value[index * size : (index + 1) * size] for name, value in source.items()} for index in indices]


def seed_generators(number: int) -> None:
    """Seed the global random generators of torch, Python and NumPy, which a user's code may use."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A batch with `function` applied to every tensor inside dicts, lists, tuples, dataclasses and graphs of torch_geometric;
    other values are kept. The lengths of a packed sequence stay on the CPU, as torch requires."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, PackedSequence):
            indices = [None if part is None else function(part) for part in (value.sorted_indices, value.unsorted_indices)]
            return PackedSequence(function(value.data), value.batch_sizes, *indices)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return dataclasses.replace(value, **map_tensors(fields, function))
        if isinstance(value, Mapping):  # a mapping of another package, such as a tokenizer's encoding
            return type(value)(map_tensors(dict(value), function))  # type: ignore[call-arg]
        if hasattr(value, "apply") and hasattr(value, "to") and not isinstance(value, nn.Module):
            return copy.copy(value).apply(function)
        return value

    return tree_map(convert, batch, is_leaf=lambda value: isinstance(value, PackedSequence))


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors inside a batch, wherever `map_tensors` finds them."""
    tensors: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        tensors.append(value)
        return value

    map_tensors(batch, note)
    return tensors


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


def forward_seed(seed: int, step: int, index: int) -> int:
    """The seed of micro-batch `index` of a step: of its samples, and of random numbers that a module draws in forward."""
    return _number(f"data:{seed}:{step}") + index


def _number(text: str) -> int:
    """A seed for what the text names."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


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
    return torch.Generator().manual_seed(_number(text))


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
        generator = _generator(f"random-ltd:{workload.seed}:{step}:{layer}")
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
