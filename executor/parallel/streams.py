"""Streams of a device, and on which side of a copy a tensor lies. All streams of the engine are asked for here alone."""

import torch
from torch import Tensor


def make_stream(device: torch.device) -> torch.Stream | None:
    """A further stream of the device; None: it has none, and everything runs in order."""
    return torch.Stream(device) if device.type != "cpu" else None


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that the device's work goes to now; only where `make_stream` gives any."""
    return torch.accelerator.current_stream(device)


def is_on_host(value: Tensor) -> bool:
    """Whether the host's processors read and write the tensor."""
    return value.device.type == "cpu"
