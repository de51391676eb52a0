"""What a rank sends: the bytes of torch's collectives, and a pipeline's messages, which the backend keeps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from search_spaces.trial import CollectiveCount

FULL_MESSAGE: Mapping[str, tuple[str, str]] = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::send": ("send", "tensors"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", ""),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
}
"""Operator -> (operation as measurements name it, the argument that is the full message; "": the result)."""


class Traffic:
    """Counts collectives by (operation, mesh dimension). A received message is counted by its sender."""

    def __init__(self) -> None:
        self.dimensions: dict[str, str] = {}
        """Name of a process group -> the mesh dimension that it serves."""
        self._sent: dict[tuple[str, str], tuple[int, int]] = {}

    def clear(self) -> None:
        """Reset all counts."""
        self._sent.clear()

    def add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> tuple[str, int]:
        """Count one call of a collective operator of `FULL_MESSAGE`; return its operation and the bytes of its full message."""
        operation, argument = FULL_MESSAGE[func._schema.name]
        arguments = {spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
        size = _bytes(arguments[argument] if argument else result)
        key = operation, self._dimension(arguments)
        count, before = self._sent.get(key, (0, 0))
        self._sent[key] = count + 1, before + size
        return operation, size

    def counts(self) -> tuple[CollectiveCount, ...]:
        """Return the counts since `clear`, sorted by name."""
        return tuple(
            CollectiveCount(operation=operation, mesh_dimension=dimension, count=count, bytes=size)
            for (operation, dimension), (count, size) in sorted(self._sent.items())
        )

    def _dimension(self, arguments: Mapping[str, Any]) -> str:
        group = arguments.get("process_group", arguments.get("group_name"))
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        name = group if isinstance(group, str) else getattr(group, "group_name", "")
        return self.dimensions.get(name, "other")


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


class _Send:
    """A message in flight, as torch's pipelines use it."""

    def __init__(self, work: dist.Work | None, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, *timeout: Any) -> bool:
        """Return at once, as there is no receiver. The tensor is kept: works of gloo and NCCL keep theirs to their end."""
        return self._work is None or self._work.wait(*timeout)


@contextmanager
def keep_sent_tensors() -> Iterator[None]:
    """Make messages keep their tensors inside the block: the works of the fake process group keep none."""
    isend = dist.isend

    def send(tensor: Tensor, *destination: Any, **how: Any) -> _Send:
        return _Send(isend(tensor, *destination, **how), tensor)

    # Patch both modules: torch checks the identity of an operation against their functions.
    with patch.object(dist, "isend", send), patch.object(distributed_c10d, "isend", send):
        yield
