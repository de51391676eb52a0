"""What kernels of scaled dot-product attention compute on each kind of device: torch's conditions, in one place.

Of torch 2.11 to 2.13 (`aten/src/ATen/native/transformers`, `sdp_utils` of the CPU and of CUDA).
"""

from collections.abc import Mapping
from dataclasses import dataclass

BEST = "best"
"""The value of `attention_backend` that leaves the choice to torch."""
LOW = ("bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel on one kind of device."""

    precisions: tuple[str, ...]
    """In which it computes."""
    masks: bool = True
    """Whether it takes a mask beside the causal one."""
    groups: bool = True
    """Whether several query heads may share one key-value head. False: keys and values are repeated for it."""


KERNELS: Mapping[str, Mapping[str, Kernel]] = {
    "cpu": {
        "flash": Kernel(precisions=("fp32", "fp64", *LOW)),
        "math": Kernel(precisions=("fp32", "fp64", *LOW)),
    },
    "cuda": {
        "flash": Kernel(precisions=LOW, masks=False),
        "efficient": Kernel(precisions=("fp32", *LOW), groups=False),
        "cudnn": Kernel(precisions=LOW),
        "math": Kernel(precisions=("fp32", "fp64", *LOW)),
    },
}  # fmt: skip
"""Kind of device -> kernel."""
LAST_RESORTS = ("math", "cudnn")
"""What torch chooses where nothing else computes it: the one that keeps every score, and one that only the newest devices try
before that."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a call of attention."""

    problem: str | None = None
    """Why the kernel that is named cannot compute it, in one clause; None: it can."""
    repeats_heads: bool = False
    """Whether keys and values must be repeated to one for each query head, so that this kernel, or any but `math`, runs."""


def verdict(kernel: str, precision: str, heads: int, kv_heads: int, device: str, masked: bool = False) -> Verdict:
    """Of a value of `attention_backend`, in a precision in which attention computes, on a kind of device (cpu or cuda).

    `masked`: whether there is a mask beside the causal one.
    """
    found = KERNELS[device]
    if kernel == BEST:
        fused = [one for name, one in found.items() if name not in LAST_RESORTS and _computes(one, precision, masked)]
        return Verdict(repeats_heads=heads != kv_heads and bool(fused) and not any(one.groups for one in fused))
    if kernel not in found:
        return Verdict(problem=f"the {kernel} kernel runs on CUDA alone")
    one = found[kernel]
    if precision not in one.precisions:
        return Verdict(problem=f"the {kernel} kernel computes in {', '.join(one.precisions)} alone, not in {precision}")
    if masked and not one.masks:
        return Verdict(problem=f"the {kernel} kernel takes no mask")
    return Verdict(repeats_heads=heads != kv_heads and not one.groups)


def _computes(kernel: Kernel, precision: str, masked: bool) -> bool:
    return precision in kernel.precisions and (kernel.masks or not masked)
