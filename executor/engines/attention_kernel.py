"""Which kernel computes scaled dot-product attention, in our modules and in a user's."""

from collections.abc import Callable, Mapping, Sequence

import torch

BEST = "best"
SWITCHES: Mapping[str, Callable[[bool], None]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
"""Value of `attention_backend` -> torch's switch of that kernel. They are the process's, and hold on CPUs too."""


def choose_attention_kernel(name: str) -> None:
    """Leave torch this kernel alone, or the choice of all. Said anew by every session, as ranks outlive their trials."""
    for kernel, switch in SWITCHES.items():
        switch(name in (BEST, kernel))


def any_kernel() -> bool:
    """Whether the choice is torch's."""
    enabled: Sequence[Callable[[], bool]] = (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.math_sdp_enabled)
    return all(one() for one in enabled)
