"""Streams of a device, and whether a tensor is on the host. The engine creates and queries streams only here."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def make_stream(device: torch.device) -> torch.Stream | None:
    """A new stream of the device; None: the device has no streams and runs everything in order."""
    return torch.Stream(device) if device.type != "cpu" else None


def current_stream(device: torch.device) -> torch.Stream:
    """The device's current stream; only for devices with streams (`make_stream`)."""
    return torch.accelerator.current_stream(device)


def working_stream(device: torch.device) -> torch.Stream | None:
    """The device's current stream; None: the device has no streams."""
    return current_stream(device) if device.type != "cpu" else None


def resumed(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Context in which work runs on `stream`, after all work that the current stream has so far.

    Autograd runs the hooks of a gradient on the stream on which it first met the parameter. That need not be the stream of the
    training step, whose other work would not wait for what the hook starts.
    """
    if stream is None:
        return nullcontext()
    current = current_stream(stream.device)
    if current == stream:
        return nullcontext()
    stream.wait_stream(current)
    return stream


def is_on_host(value: Tensor) -> bool:
    """Whether the tensor is in host memory."""
    return value.device.type == "cpu"
