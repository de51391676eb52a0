"""A trial inside a rank whose device is full when backward begins; reports the bytes on the device before the trial."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from executor.engine import RankContext
from executor.trial.run import run_trial as run_plain
from search_spaces.trial import Progress, TrialRequest, TrialResult

FULL = "out-of-memory"
"""The attempt whose backward runs out of memory."""
LEAST_BYTES = 1 << 20


def run_trial(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    """`executor.trial.run.run_trial`; the result's environment has `allocated_before`, in bytes."""
    held = _allocated(context.device)
    with _full_in_backward(context.device) if request.attempt == FULL else contextlib.nullcontext():
        result = run_plain(context, request, progress)
    return dataclasses.replace(result, environment={**result.environment, "allocated_before": str(held)})


@contextmanager
def _full_in_backward(device: torch.device) -> Iterator[None]:
    """Backward runs out of memory. On CUDA all bytes are taken first; on a CPU, whose memory is shared, the error is raised."""
    backward = Tensor.backward
    taken: list[Tensor] = []

    def full(self: Tensor, *how: Any, **options: Any) -> None:
        if device.type == "cuda":
            taken.extend(_take_all(device))
        else:
            self.register_hook(_raise)
        backward(self, *how, **options)

    with patch.object(Tensor, "backward", full):
        try:
            yield
        finally:
            taken.clear()


def _take_all(device: torch.device) -> Iterator[Tensor]:
    """Allocate tensors until less than a mebibyte of the device is free."""
    size = torch.cuda.get_device_properties(device).total_memory
    while size >= LEAST_BYTES:
        try:
            yield torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            size //= 2


def _raise(_: Tensor) -> None:
    raise torch.OutOfMemoryError("planted in backward: tried to allocate more than available")


def _allocated(device: torch.device) -> int:
    """Bytes of live tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in gc.get_objects()
                if issubclass(type(value), Tensor)}  # fmt: skip
    return sum(storages.values())
