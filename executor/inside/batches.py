"""Micro-batches of an optimizer step, made from what the user's loader yields: the same samples in the same order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Count = Callable[[Any], float]


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch."""

    batch: Any
    weight: float
    """Factor of its mean loss, so that the sum over the step is the loss of the step."""
    is_last: bool
    is_first: bool = False


def rows_of(batch: Any) -> int:
    """The number of samples of a batch: the first dimension of its first tensor.

    Raises:
        ValueError: it has no tensor.
    """
    tensor = batch if isinstance(batch, torch.Tensor) else next(_tensors(batch), None)
    if tensor is None:
        raise ValueError("a batch has no tensor: its samples cannot be counted; leave micro_batch_size out of the knobs")
    return tensor.size(0)


def counted(batch: Any) -> float:
    """What a mean loss is a mean of: predicted tokens if the batch has `labels` of tokens, else samples."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point():
        # Causal models predict the next token: the first label of a sample is not predicted.
        return float((labels[:, 1:] != -100).sum())
    return float(rows_of(batch))


def parts_of(batches: Sequence[Any], micro_batch_size: int, count: Count = counted) -> list[Part]:
    """Divide or join the batches of one optimizer step.

    The reference is a loop that trains on each batch and divides its mean loss by the number of batches. A part of a batch
    has the batch's weight times its share of what is counted. Batches are joined only if they are equal in shapes and counts.
    """
    if len(batches) == 1 and rows_of(batches[0]) <= micro_batch_size:
        return [Part(batches[0], 1.0, is_last=True, is_first=True)]
    groups = joined(batches, micro_batch_size, count) if len(batches) > 1 else [(batch, 1) for batch in batches]
    made: list[tuple[Any, float]] = []
    for batch, number in groups:
        share = number / len(batches)
        rows = rows_of(batch)
        if rows <= micro_batch_size:
            made.append((batch, share))
            continue
        pieces = [piece(batch, start, min(start + micro_batch_size, rows), rows) for start in range(0, rows, micro_batch_size)]
        counts = [count(each) for each in pieces]
        # Without anything that is counted the loss is not a number, divided or not.
        total = sum(counts) or 1.0
        made += [(each, share * value / total) for each, value in zip(pieces, counts, strict=True)]
    return [Part(batch, weight, number == len(made), number == 1) for number, (batch, weight) in enumerate(made, 1)]


def joined(batches: Sequence[Any], micro_batch_size: int, count: Count) -> list[tuple[Any, int]]:
    """Batches with the number of the loader's batches that each consists of."""
    rows = rows_of(batches[0])
    several = max(micro_batch_size // rows, 1)
    if several == 1 or not are_alike(batches, count):
        return [(batch, 1) for batch in batches]
    groups = [batches[start : start + several] for start in range(0, len(batches), several)]
    return [(_join(group), len(group)) for group in groups]


def are_alike(batches: Sequence[Any], count: Count = counted) -> bool:
    """Whether batches can be joined: equal shapes, and equal counts, so that the mean of all is the mean of their means."""
    shapes = {tuple(tuple(tensor.shape) for tensor in _tensors(batch)) for batch in batches}
    return len(shapes) == 1 and len({count(batch) for batch in batches}) == 1


def piece(batch: Any, start: int, end: int, rows: int) -> Any:
    """Samples `start` to `end` of a batch with `rows` samples. What has another length is for all samples."""
    if isinstance(batch, torch.Tensor):
        return batch[start:end] if batch.dim() and batch.shape[0] == rows else batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: piece(value, start, end, rows) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(piece(value, start, end, rows) for value in batch))
    if isinstance(batch, list | tuple):
        if len(batch) == rows and not any(isinstance(value, torch.Tensor | Mapping | list | tuple) for value in batch):
            return batch[start:end]
        return type(batch)(piece(value, start, end, rows) for value in batch)
    return batch


def _join(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches)) if first.dim() else first
    if isinstance(first, Mapping):
        return _like(first, {key: _join([batch[key] for batch in batches]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_join(values) for values in zip(*batches, strict=True)))
    if isinstance(first, list | tuple):
        if any(isinstance(value, torch.Tensor | Mapping | list | tuple) for value in first):
            return type(first)(_join(values) for values in zip(*batches, strict=True))
        return type(first)(value for batch in batches for value in batch)
    return first


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    return values if type(batch) is dict else type(batch)(values)  # type: ignore[call-arg]


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
