"""Where kernels run: those of scaled dot-product attention, and fused kernels of third-party packages.

Does not import torch, because rules, engine and prediction import it.

Valid for torch 2.11 to 2.13 (`aten/src/ATen/native/transformers`, `sdp_utils` of the CPU and of CUDA).
"""

import importlib.metadata
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from search_spaces.errors import Refusal
from search_spaces.models.model import ModelSpec, Norm, Position

FUSED_KERNELS = "fused_kernels"
NONE = "none"
LIGER = "liger"
TRANSFORMER_ENGINE = "transformer_engine"
NORM, ROTATION, GATE, LOSS = "norms", "rotary embedding", "gate of the MLP", "output projection with its loss"
DEVICE_RULE, PACKAGE_RULE, PRECISION_RULE = "fused-kernels-device", "fused-kernels-package", "fused-kernels-precision"
OFF = f"set {FUSED_KERNELS}={NONE}"
REMEDIES: Mapping[str, str] = {
    DEVICE_RULE: OFF,
    PACKAGE_RULE: f"install that where ranks run, or {OFF}",
    PRECISION_RULE: f"choose one of these precisions, or {OFF}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package and its verified releases: other releases may have other argument orders."""

    title: str
    module: str
    """Import name."""
    distribution: str
    """Name for pip."""
    first: tuple[int, int]
    """First verified release, major and minor."""
    before: tuple[int, int]
    """First release that is not verified any more."""
    precisions: tuple[str, ...]
    why_precisions: str
    """Why other precisions are not supported, in one clause."""

    @property
    def requirement(self) -> str:
        """The pip requirement."""
        return f"{self.distribution}>={_dotted(self.first)},<{_dotted(self.before)}"

    def supports(self, version: str) -> bool:
        """Whether this release is verified."""
        match = re.match(r"(\d+)\.(\d+)", version)
        return match is not None and self.first <= (int(match[1]), int(match[2])) < self.before


PACKAGES: Mapping[str, Package] = {
    LIGER: Package(
        title="Liger",
        module="liger_kernel",
        distribution="liger-kernel",
        first=(0, 8),
        before=(0, 9),
        precisions=("bf16", "fp32"),
        why_precisions="its kernels compute in fp32, and its loss makes gradients before the scale of fp16 losses is known",
    ),
    TRANSFORMER_ENGINE: Package(
        title="Transformer Engine",
        module="transformer_engine",
        distribution="transformer-engine",
        first=(2, 0),
        before=(3, 0),
        precisions=("bf16", "fp16", "fp32"),
        why_precisions="its norms compute in fp32",
    ),
}
"""Value of `fused_kernels` -> its package."""
KERNEL_CHOICES = (NONE, *PACKAGES)


def installed_kernels() -> dict[str, str]:
    """Module -> version of the installed packages. Does not import them."""
    versions = {}
    for package in PACKAGES.values():
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package.module] = importlib.metadata.version(package.distribution)
    return versions


def device_problem(name: str, kind: str, device: str) -> str | None:
    """Why kernels do not run on a device of this kind; None: they do."""
    if name == NONE or kind == "cuda":
        return None
    return f"kernels of {PACKAGES[name].title} run only on CUDA devices, not on {device}"


def package_problem(name: str, installed: Mapping[str, str] | None) -> str | None:
    """Why a package that ranks would import cannot be used; `installed`: module -> version, None: unknown."""
    if name == NONE or installed is None:
        return None
    package = PACKAGES[name]
    version, command = installed.get(package.module), f"(pip install '{package.requirement}')"
    if version is None:
        return f"{package.distribution} is not installed {command}"
    return None if package.supports(version) else f"{package.distribution} {version} is not a supported release {command}"


def precision_problem(name: str, precision: str) -> str | None:
    """Why kernels do not support a precision; None: they do."""
    if name == NONE or precision in (package := PACKAGES[name]).precisions:
        return None
    return f"{package.title} supports {' and '.join(package.precisions)}, not {precision}: {package.why_precisions}"


def kernel_refusals(name: str, precision: str, kind: str, device: str, installed: Mapping[str, str] | None) -> list[Refusal]:
    """All refusals of kernels on a device, with the names of their rules."""
    problems = {
        DEVICE_RULE: device_problem(name, kind, device),
        PACKAGE_RULE: package_problem(name, installed),
        PRECISION_RULE: precision_problem(name, precision),
    }
    return [Refusal(rule, problem, REMEDIES[rule]) for rule, problem in problems.items() if problem is not None]


def runs_on(name: str, kind: str, installed: Mapping[str, str] | None) -> bool:
    """Whether kernels are known to run there; only then they are searched by default."""
    is_installed = installed is not None and package_problem(name, installed) is None
    return name == NONE or (is_installed and device_problem(name, kind, kind) is None)


def replaced(name: str, model: ModelSpec, tensor_parallel_size: int) -> frozenset[str]:
    """Which of our modules the kernels replace.

    Liger rotates whole heads, has no LayerNorm that is better than torch's, gates only with SiLU, and its loss needs the whole
    vocabulary, so our own loss is kept if tensor ranks divide the vocabulary. Norms of heads and zero-centred norms are ours.
    """
    if name == NONE:
        return frozenset()
    if name == TRANSFORMER_ENGINE:
        return frozenset() if model.zero_centered_norms else frozenset({NORM})
    replaceable = {
        NORM: model.norm is Norm.RMSNORM and not model.zero_centered_norms,
        ROTATION: model.position is Position.ROTARY and model.rotary_fraction == 1,
        GATE: model.gated_mlp and model.activation == "silu",
        LOSS: tensor_parallel_size == 1 and not model.output_softcap,
    }
    return frozenset(module for module, holds in replaceable.items() if holds)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


BEST = "best"
"""The value of `attention_backend` with which torch chooses the kernel."""
HALF_PRECISIONS = ("bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """One kernel of scaled dot-product attention on one kind of device."""

    precisions: tuple[str, ...]
    """Precisions that it supports."""
    masks: bool = True
    """Whether it accepts a mask in addition to the causal one."""
    groups: bool = True
    """Whether several query heads may share one key-value head. False: keys and values must be repeated."""
    score_bytes: float = 0.0
    """Bytes kept per element of the attention matrix."""


MATH = "math"
"""Attention by separate operators of torch: scores and their softmax are kept."""
ENGINE_ATTENTION = {"flash": "flash", "cudnn": "fused", "math": "unfused"}
"""Attention kernel -> its name in Transformer Engine."""
ATTENTION_KERNELS: Mapping[str, Mapping[str, AttentionKernel]] = {
    "cpu": {
        "flash": AttentionKernel(precisions=("fp32", "fp64", *HALF_PRECISIONS)),
        MATH: AttentionKernel(precisions=("fp32", "fp64", *HALF_PRECISIONS), score_bytes=5.5),
    },
    "cuda": {
        "flash": AttentionKernel(precisions=HALF_PRECISIONS, masks=False),
        "efficient": AttentionKernel(precisions=("fp32", *HALF_PRECISIONS), groups=False),
        "cudnn": AttentionKernel(precisions=HALF_PRECISIONS),
        MATH: AttentionKernel(precisions=("fp32", "fp64", *HALF_PRECISIONS), score_bytes=5.5),
    },
}  # fmt: skip
"""Kind of device -> kernel."""


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """Whether and how an attention call can run."""

    problem: str | None = None
    """Why the named kernel cannot run, in one clause; None: it can."""
    repeats_heads: bool = False
    """Whether keys and values must be repeated for each query head, so that this kernel (or any except `math`) can run."""


def verdict(kernel: str, precision: str, heads: int, kv_heads: int, device: str, masked: bool = False) -> KernelVerdict:
    """Check one value of `attention_backend` for a compute precision on a device kind (cpu or cuda).

    `masked`: whether there is a mask in addition to the causal one.
    """
    kernels = ATTENTION_KERNELS[device]
    if kernel == BEST:
        fused = [
            candidate
            for name, candidate in kernels.items()
            # Last resorts: math stores every score, and only the newest devices try cudnn before it.
            if name not in (MATH, "cudnn") and precision in candidate.precisions and (candidate.masks or not masked)
        ]
        return KernelVerdict(
            repeats_heads=heads != kv_heads and len(fused) > 0 and not any(candidate.groups for candidate in fused)
        )
    if kernel not in kernels:
        return KernelVerdict(problem=f"the {kernel} kernel runs only on CUDA")
    candidate = kernels[kernel]
    if precision not in candidate.precisions:
        return KernelVerdict(problem=f"the {kernel} kernel supports only {', '.join(candidate.precisions)}, not {precision}")
    if masked and not candidate.masks:
        return KernelVerdict(problem=f"the {kernel} kernel does not accept a mask")
    return KernelVerdict(repeats_heads=heads != kv_heads and not candidate.groups)
