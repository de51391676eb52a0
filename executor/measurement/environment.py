"""Versions and hardware as a rank sees them."""

import os
import platform

import torch
import torch.distributed as dist

from search_spaces.environment import VARIABLES


def environment(device: torch.device) -> dict[str, str]:
    """Versions and hardware as this rank sees them."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "threads_per_rank": str(torch.get_num_threads()),
        "backend": str(dist.get_backend()) if dist.is_initialized() else "none",
    }
    # Variables of the trial and of the node itself.
    if variables := " ".join(f"{name}={os.environ[name]}" for name in sorted(VARIABLES) if name in os.environ):
        facts["variables"] = variables
    if device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        facts["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return facts
