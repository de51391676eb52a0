"""Training states in the format of torch.distributed.checkpoint: saved under one layout, loaded under any other.

1. A rank's share of a parameter is a range of the parameter's slice, row by row. It is cut into rectangles of the whole
   parameter, at most three of them: the rest of a row, whole rows, the beginning of a row.
2. torch's planners write each rectangle once, however many ranks hold it, and equally many bytes on each of these ranks.
3. Another layout has other rectangles; torch reads the parts of saved ones that lie in them.

Saved are, by the parameter's name in the whole model: the master values (`model.NAME`, so that the folder also is a file of
weights) and the optimizer's moments (`optimizer.MOMENT.NAME`), and the optimizer's number of steps.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)  # fmt: skip
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)  # fmt: skip
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from executor.errors import CheckpointError

WEIGHTS, MOMENTS, STEPS = "model.", "optimizer.", "optimizer.steps"
METADATA = ".metadata"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Piece:
    """A rectangle of a saved tensor, as this rank holds it."""

    name: str
    shape: torch.Size
    """Of the whole tensor."""
    offsets: torch.Size
    values: Tensor
    """Of the rectangle's size; a view of the rank's state, into which `load` writes."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The rectangle, as torch describes it."""
        return ChunkStorageMetadata(offsets=self.offsets, sizes=self.values.size())

    @property
    def index(self) -> MetadataIndex:
        """Its name in plans."""
        return MetadataIndex(self.name, self.offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that was written."""

    own_bytes: int
    """Written by this rank."""
    seconds: float
    """Until every rank had written its part."""


def rectangles(
    name: str, values: Tensor, start: int, slice_shape: Sequence[int], shape: Sequence[int], offsets: Sequence[int]
) -> Iterator[Piece]:
    """The elements from `start` on of a slice, row by row, as rectangles of the whole tensor.

    Args:
        name: of the whole tensor.
        values: flat and consecutive.
        start: index of their first one in the flat slice.
        slice_shape: of the slice; one or two dimensions.
        shape: of the whole tensor.
        offsets: where the slice begins in it.
    """
    if len(slice_shape) == 1:
        yield Piece(
            name=name, shape=torch.Size(shape), offsets=torch.Size((offsets[0] + start,)), values=values
        )  # fmt: skip
        return
    columns, done = slice_shape[1], 0
    while done < values.numel():
        row, column = divmod(start + done, columns)
        remaining = values.numel() - done
        width = min(columns - column, remaining)
        rows = remaining // columns if column == 0 and remaining >= columns else 1
        part = values[done : done + rows * width].view(rows, width)
        part_offsets = torch.Size((offsets[0] + row, offsets[1] + column))
        yield Piece(name=name, shape=torch.Size(shape), offsets=part_offsets, values=part)
        done += rows * width


def save(folder: Path, pieces: Sequence[Piece]) -> Saved:
    """Write the pieces of all ranks to a folder. Every rank calls it.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    started, planner = time.monotonic(), _SavePlanner(pieces)
    try:
        save_state_dict({}, storage_writer=FileSystemWriter(folder), planner=planner)
    except (CheckpointException, OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: cannot be written ({_reason(error)}); name a folder that every node can write"
        ) from None
    return Saved(own_bytes=planner.own_bytes, seconds=time.monotonic() - started)


def load(folder: Path, pieces: Sequence[Piece]) -> float:
    """Fill the pieces from a folder; return the seconds. Every rank calls it.

    Raises:
        CheckpointError: it is not a checkpoint, is damaged, or is one of another model or optimizer.
    """
    if not (folder / METADATA).is_file():
        raise CheckpointError(f"{folder}: is not a checkpoint, {METADATA} is missing; name a folder that a trial has saved")
    started = time.monotonic()
    try:
        load_state_dict({}, storage_reader=FileSystemReader(folder), planner=_LoadPlanner(pieces))
    except (CheckpointException, OSError, ValueError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{folder}: cannot be loaded ({_reason(error)}); use an earlier checkpoint") from None
    return time.monotonic() - started


def _reason(error: BaseException) -> str:
    """The first failure in one line: torch collects those of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class _SavePlanner(DefaultSavePlanner):
    """Plans this rank's pieces; removal of copies and checks are torch's."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {piece.index: piece for piece in pieces}
        self.own_bytes = 0

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=piece.index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk, properties=TensorProperties.create_from_tensor(piece.values), size=piece.shape
                ),
            )
            for piece in self._pieces.values()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.own_bytes = sum(self._piece(item.index).values.nbytes for item in new_plan.items)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._piece(write_item.index).values.detach().contiguous()

    def _piece(self, index: MetadataIndex) -> Piece:
        # The global plan adds a number to the index; it is not part of its equality.
        return self._pieces[dataclasses.replace(index, index=None)]


class _LoadPlanner(DefaultLoadPlanner):
    """Reads what lies in this rank's pieces."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._of: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._of.setdefault(piece.name, []).append(piece)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return LoadPlan([item for name, pieces in self._of.items() for item in _reads(name, pieces, self.metadata)])

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        values = self._of[index.fqn][index.index or 0].values
        for dimension, (first, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dimension, first, size)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: `resolve_tensor` returns views."""


def _reads(name: str, pieces: Sequence[Piece], metadata: Metadata) -> list[ReadItem]:
    """What to read of a tensor.

    Raises:
        ValueError: the checkpoint has another shape or type of it, or not all of it.
    """
    stored = metadata.state_dict_metadata.get(name)
    if not isinstance(stored, TensorStorageMetadata):
        raise ValueError(f"{name} is not in it")
    first = pieces[0]
    if stored.size != first.shape:
        raise ValueError(f"{name} has the shape {tuple(stored.size)}, not {tuple(first.shape)}")
    if stored.properties.dtype != first.values.dtype:
        raise ValueError(f"{name} has the type {stored.properties.dtype}, not {first.values.dtype}")
    items = create_read_items_for_chunk_list(name, stored, [piece.chunk for piece in pieces])
    elements = sum(piece.values.numel() for piece in pieces)
    if sum(torch.Size(item.lengths).numel() for item in items) != elements:
        raise ValueError(f"a part of {name} is not in it")
    return items


def bytes_of(saved: Saved) -> int:
    """Bytes that all ranks wrote together. Every rank calls it."""
    if not dist.is_initialized():
        return saved.own_bytes
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, saved.own_bytes)
    return sum(gathered)
