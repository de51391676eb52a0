"""Which scaled dot-product attention kernels can run on each device kind: torch's conditions, in one place.

Valid for torch 2.11 to 2.13 (`aten/src/ATen/native/transformers`, `sdp_utils` of the CPU and of CUDA).
"""

from collections.abc import Mapping
from dataclasses import dataclass

BEST = "best"
"""The value of `attention_backend` with which torch chooses the kernel."""
HALF_PRECISIONS = ("bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel on one kind of device."""

    precisions: tuple[str, ...]
    """Precisions that it supports."""
    masks: bool = True
    """Whether it accepts a mask in addition to the causal one."""
    groups: bool = True
    """Whether several query heads may share one key-value head. False: keys and values must be repeated."""


KERNELS: Mapping[str, Mapping[str, Kernel]] = {
    "cpu": {
        "flash": Kernel(precisions=("fp32", "fp64", *HALF_PRECISIONS)),
        "math": Kernel(precisions=("fp32", "fp64", *HALF_PRECISIONS)),
    },
    "cuda": {
        "flash": Kernel(precisions=HALF_PRECISIONS, masks=False),
        "efficient": Kernel(precisions=("fp32", *HALF_PRECISIONS), groups=False),
        "cudnn": Kernel(precisions=HALF_PRECISIONS),
        "math": Kernel(precisions=("fp32", "fp64", *HALF_PRECISIONS)),
    },
}  # fmt: skip
"""Kind of device -> kernel."""
LAST_RESORTS = ("math", "cudnn")
"""Kernels that torch chooses if no other kernel can run: `math` stores every score; only the newest devices try `cudnn` before
it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether and how an attention call can run."""

    problem: str | None = None
    """Why the named kernel cannot run, in one clause; None: it can."""
    repeats_heads: bool = False
    """Whether keys and values must be repeated for each query head, so that this kernel (or any except `math`) can run."""


def verdict(kernel: str, precision: str, heads: int, kv_heads: int, device: str, masked: bool = False) -> Verdict:
    """Check one value of `attention_backend` for a compute precision on a device kind (cpu or cuda).

    `masked`: whether there is a mask in addition to the causal one.
    """
    found = KERNELS[device]
    if kernel == BEST:
        fused = [one for name, one in found.items() if name not in LAST_RESORTS and _computes(one, precision, masked)]
        return Verdict(repeats_heads=heads != kv_heads and bool(fused) and not any(one.groups for one in fused))
    if kernel not in found:
        return Verdict(problem=f"the {kernel} kernel runs only on CUDA")
    one = found[kernel]
    if precision not in one.precisions:
        return Verdict(problem=f"the {kernel} kernel supports only {', '.join(one.precisions)}, not {precision}")
    if masked and not one.masks:
        return Verdict(problem=f"the {kernel} kernel does not accept a mask")
    return Verdict(repeats_heads=heads != kv_heads and not one.groups)


def _computes(kernel: Kernel, precision: str, masked: bool) -> bool:
    return precision in kernel.precisions and (kernel.masks or not masked)
