"""Training data: every layout gets the same global batch for a step, cut into this rank's micro-batches."""

import functools
import hashlib
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from executor.errors import DataError, FactoryError
from search_spaces.trial import Workload

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
