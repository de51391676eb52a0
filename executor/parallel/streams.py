"""Streams of a device, and whether a tensor is on the host. The engine creates and queries streams only here."""

import torch
from torch import Tensor


def make_stream(device: torch.device) -> torch.Stream | None:
    """A new stream of the device; None: the device has no streams and runs everything in order."""
    return torch.Stream(device) if device.type != "cpu" else None


def current_stream(device: torch.device) -> torch.Stream:
    """The device's current stream; only for devices with streams (`make_stream`)."""
    return torch.accelerator.current_stream(device)


def is_on_host(value: Tensor) -> bool:
    """Whether the tensor is in host memory."""
    return value.device.type == "cpu"
