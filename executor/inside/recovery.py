"""What an optimizer step that ran out of memory leaves behind, and how it is undone."""

import gc
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

_TEXTS = ("out of memory", "can't allocate memory", "alloc_failed", "unable to allocate", "cannot allocate memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, on a device or on the host. Chained errors count: a library may wrap the cause."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        text = str(error).lower()
        if isinstance(error, RuntimeError | OSError) and any(part in text for part in _TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def release(trace: TracebackType | None = None) -> None:
    """Free what a failed step holds: the frames of its error, cycles, and cached blocks of the device."""
    if trace is not None:
        traceback.clear_frames(trace)
    gc.collect()
    if _counts():
        torch.cuda.empty_cache()


class Snapshot:
    """The parameters and the optimizer's states before an update, so that one that stopped in the middle can be undone.

    It is taken only while a setting is new, in host memory.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._values = [(parameter, _copy(parameter.detach())) for parameter in parameters]
        self._states = {
            parameter: {
                name: _copy(value) if isinstance(value, torch.Tensor) else value
                for name, value in optimizer.state[parameter].items()
            }
            for parameter in parameters
            if parameter in optimizer.state
        }

    def restore(self) -> None:
        """Undo the update in place."""
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.detach().copy_(value)
            for parameter in [*self._optimizer.state]:
                if parameter not in self._states:
                    del self._optimizer.state[parameter]
            for parameter, state in self._states.items():
                current = self._optimizer.state[parameter]
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and isinstance(current.get(name), torch.Tensor):
                        current[name].copy_(value)
                    else:
                        current[name] = value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True) if tensor.is_cuda else tensor.detach().clone()


def reduce_gradients(parameters: Iterable[Any], group: Any = None) -> None:
    """Average gradients over ranks after a step in which DDP did not: what its buckets would have done."""
    world = dist.get_world_size(group)
    gradients = [parameter.grad for parameter in parameters if parameter.requires_grad and parameter.grad is not None]
    for gradient in gradients:
        # DDP divides before it adds.
        gradient.div_(world)
        dist.all_reduce(gradient, group=group)


def device_peak() -> int | None:
    """Bytes of the peak of the device's allocator since `reset_peak`; None: there is no device that counts."""
    return torch.cuda.max_memory_allocated() if _counts() else None


def standing_bytes() -> int | None:
    """Bytes that are allocated now, between two steps."""
    return torch.cuda.memory_allocated() if _counts() else None


def reset_peak() -> None:
    """Begin to measure the peak anew."""
    if _counts():
        torch.cuda.reset_peak_memory_stats()


def device_bytes() -> int | None:
    """Memory of this rank's device."""
    return int(torch.cuda.mem_get_info()[1]) if _counts() else None


def _counts() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
