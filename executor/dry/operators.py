"""What an operator of a dry run computes and sends: matrix products and FLOPs, and messages of collectives and pipelines."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d

from search_spaces.trial import CollectiveCount

aten = torch.ops.aten
Shape = tuple[int, int, int]
"""(rows, inner, outer): 2 x rows x inner x outer FLOPs."""
_MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
"""Operator -> index of the first of its two factors."""
ATTENTION = "scaled_dot_product"
"""Part of the name of fused attention operators."""


def products_of(packet: Any, args: tuple[Any, ...], flops: int) -> list[Shape]:
    """The products of one call of a counted operator; one cube of equal FLOPs if its shapes are not known here.

    A convolution multiplies rows of (samples x positions of the output) by its kernels; its backward computes as many FLOPs for
    each gradient that is wanted.
    """
    if packet in _MATRICES:
        matrix, other = args[_MATRICES[packet] : _MATRICES[packet] + 2]
        *batch, rows, inner = matrix.shape
        return [(math.prod(batch) * rows, inner, other.shape[-1])]
    if packet in (aten.convolution, aten._convolution):
        return [_convolution(args[1], args[6], args[8], flops)]
    if packet is aten.convolution_backward:
        gradient_count = max(sum(map(bool, args[10][:2])), 1)
        return [_convolution(args[2], args[7], args[9], flops // gradient_count)] * gradient_count
    side = max(round((flops / 2) ** (1 / 3)), 1)
    return [(side, side, side)]


def _convolution(weight: Any, transposed: bool, groups: int, flops: int) -> Shape:
    """From the weight [outputs, inputs / groups, …], or [inputs, outputs / groups, …] if transposed; rows from the FLOPs."""
    first, second, *kernel = weight.shape
    taps = math.prod(kernel)
    inner, outer = (first // groups * taps, second * groups) if transposed else (second * taps, first)
    return max(round(flops / (2 * inner * outer)), 1), inner, outer


def workspace_bytes(packet: Any, args: tuple[Any, ...], flops: int | None) -> int:
    """Temporary memory of a CPU's kernel beside its results: reordered operands of convolutions and recurrent layers, and of
    the latter the gates of all steps and in backward the gradient of the output [counted, torch 2.13]. Convolutions of at most
    1 GFLOP run once on zeros, because the kernel that oneDNN chooses depends on layouts, groups and the processor."""
    if packet in (aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward):
        x, inputs, hidden = args[:3]
        rows, (gates, width) = x.numel() // x.shape[-1], hidden.shape
        output = rows * width if packet is aten.mkldnn_rnn_layer_backward else 0
        return int((inputs.numel() + hidden.numel() + rows * gates + output) * x.element_size())
    if packet not in (aten.convolution, aten._convolution, aten.convolution_backward):
        return 0
    if flops is not None and flops <= 1e9:
        return _measured_workspace(packet, tuple(
            (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, Tensor)
            else tuple(value) if isinstance(value, list | tuple) else value
            for value in args
        ))  # fmt: skip
    if packet is aten.convolution_backward:
        (gradient, x, weight), strides, groups = args[:3], args[4], args[9]
    else:
        (x, weight), strides, groups = args[:2], args[3], args[8]
    if groups == 1 and max(*weight.shape[2:], *strides) == 1:
        return 0  # a plain matrix product
    # oneDNN reorders operands in memory of their own from 16 channels on, then the result.
    entry, kernels = (value.numel() * value.element_size() for value in (x, weight))
    entry *= x.shape[1] >= 16
    if packet is not aten.convolution_backward:
        return int(entry + kernels * (groups == 1))
    wide = x.shape[1] < 16 and max(weight.shape[2:]) >= 16  # as of patches
    return int(
        max(entry + gradient.numel() * gradient.element_size() * (gradient.shape[1] >= 16), kernels * (4 if wide else 1))
    )


@functools.cache
def _measured_workspace(packet: Any, operands: tuple[Any, ...]) -> int:
    """The peak of an operator on zeros beyond its results; tensors are (dtype, shape, strides)."""
    with unset_fake_temporarily():
        values = [
            torch.empty_strided(*value[1:], dtype=value[0]).zero_()
            if isinstance(value, tuple) and value and isinstance(value[0], torch.dtype)
            else list(value) if isinstance(value, tuple) else value
            for value in operands
        ]  # fmt: skip
        # The legacy recorder starts in microseconds and prints nothing.
        _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
        try:
            results = packet(*values)
        except RuntimeError:  # there is no kernel of this type for CPUs
            return 0
        finally:
            recorded = _disable_profiler_legacy()
    events = (event for thread in recorded for event in thread)
    changes = (event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc")  # type: ignore[comparison-overlap]
    return max(max(itertools.accumulate(changes), default=0) - _bytes(results), 0)


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
