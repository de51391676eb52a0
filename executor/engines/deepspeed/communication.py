"""Counts the bytes that DeepSpeed's unmodified collectives send, by operation and mesh dimension."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from search_spaces.mesh import DIMENSIONS, PIPELINE, Mesh

WORLD = "world"
"""The dimension of a group whose ranks differ along more than one mesh dimension."""

# Method of DeepSpeed's backend -> its name here, keyword and index of the full message, and index of the group.
_CALLS: Mapping[str, tuple[str, str, int, int]] = {
    "all_reduce": ("all_reduce", "tensor", 0, 2),
    "inference_all_reduce": ("all_reduce", "tensor", 0, 2),
    "all_reduce_coalesced": ("all_reduce", "tensors", 0, 2),
    "reduce": ("reduce", "tensor", 0, 3),
    "reduce_scatter": ("reduce_scatter", "input_list", 1, 3),
    "reduce_scatter_tensor": ("reduce_scatter", "input_tensor", 1, 3),
    "all_gather": ("all_gather", "tensor_list", 0, 2),
    "all_gather_into_tensor": ("all_gather", "output_tensor", 0, 2),
    "all_gather_coalesced": ("all_gather", "output_tensors", 0, 2),
    "all_to_all_single": ("all_to_all", "input", 1, 4),
    "broadcast": ("broadcast", "tensor", 0, 2),
}
_SENDS = ("send", "isend")
_MESSAGE_EACH = ("all_gather_coalesced",)
"""Methods that send every tensor of their list in its own message."""


class Account:
    """Counts what a backend of DeepSpeed sends, from `attach` to `detach`."""

    def __init__(self, mesh: Mesh) -> None:
        self._coordinates = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
        self._dimensions: dict[int, str | None] = {}
        self._backend: Any = None
        self.sent: dict[tuple[str, str], tuple[int, int]] = {}
        """(operation, mesh dimension) -> (count, bytes of the full messages) so far."""

    def attach(self, backend: Any) -> None:
        """Wrap the methods of `backend`."""
        self._backend = backend
        for method, (operation, message, index, group) in _CALLS.items():
            if hasattr(backend, method):
                setattr(backend, method, self._counted(method, getattr(backend, method), operation, message, index, group))
        for method in _SENDS:
            setattr(backend, method, self._counted_send(getattr(backend, method)))

    def detach(self) -> None:
        """Restore the backend's methods. May be called twice."""
        backend, self._backend = self._backend, None
        for method in (*_CALLS, *_SENDS) if backend is not None else ():
            backend.__dict__.pop(method, None)

    def _counted(
        self, method: str, call: Callable[..., Any], operation: str, message: str, index: int, group: int
    ) -> Callable[..., Any]:
        each = method in _MESSAGE_EACH

        def counted(*args: Any, **kwargs: Any) -> Any:
            value = kwargs[message] if message in kwargs else args[index]
            process_group = kwargs["group"] if "group" in kwargs else args[group] if len(args) > group else None
            parts = [value] if isinstance(value, Tensor) else list(value)
            self._record(operation, self._dimension(process_group), len(parts) if each else 1, parts)
            return call(*args, **kwargs)

        return counted

    def _counted_send(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, dst: int, *args: Any, **kwargs: Any) -> Any:
            self._record("send", PIPELINE, 1, [tensor])
            return call(tensor, dst, *args, **kwargs)

        return counted

    def _record(self, operation: str, dimension: str | None, count: int, messages: Iterable[Tensor]) -> None:
        if dimension is None:
            return
        before, size = self.sent.get((operation, dimension), (0, 0))
        self.sent[operation, dimension] = (before + count, size + sum(message.nbytes for message in messages))

    def _dimension(self, group: Any) -> str | None:
        """The mesh dimension along which the group's ranks differ; None: it has one rank, so nothing is sent."""
        if id(group) not in self._dimensions:
            self._dimensions[id(group)] = self._of_ranks(dist.get_process_group_ranks(group))
        return self._dimensions[id(group)]

    def _of_ranks(self, ranks: Iterable[int]) -> str | None:
        coordinates = [self._coordinates[rank] for rank in ranks]
        differing = [name for name in DIMENSIONS if len({one[name] for one in coordinates}) > 1]
        if not differing:
            return None
        return differing[0] if len(differing) == 1 else WORLD
