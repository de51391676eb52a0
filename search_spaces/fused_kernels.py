"""Fused kernels of others' packages (`fused_kernels`): which there are, where they run, what of our modules they replace.

Imports no torch: rules, engine and prediction read it.
"""

import importlib.metadata
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from search_spaces.models.model import ModelSpec, Norm, Position
from search_spaces.refusal import Refusal

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
    """One package, and the releases of it whose source was read: another may take its arguments in another order."""

    title: str
    module: str
    """As it is imported."""
    distribution: str
    """As it is installed."""
    first: tuple[int, int]
    """The first release, major and minor."""
    before: tuple[int, int]
    """The first release that is not known any more."""
    precisions: tuple[str, ...]
    why_precisions: str
    """Why no others, in one clause."""

    @property
    def wanted(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}>={_dotted(self.first)},<{_dotted(self.before)}"

    def knows(self, version: str) -> bool:
        """Whether this release is one of those."""
        found = re.match(r"(\d+)\.(\d+)", version)
        return found is not None and self.first <= (int(found[1]), int(found[2])) < self.before


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
    """Module -> version, of the packages that this Python has. Nothing is imported."""
    found = {}
    for package in PACKAGES.values():
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package.module] = importlib.metadata.version(package.distribution)
    return found


def device_problem(name: str, kind: str, device: str) -> str | None:
    """Why kernels do not run on a device of that kind; None: they do."""
    if name == NONE or kind == "cuda":
        return None
    return f"kernels of {PACKAGES[name].title} run on CUDA devices alone, not on {device}"


def package_problem(name: str, installed: Mapping[str, str] | None) -> str | None:
    """What is wrong with a package that ranks would import; `installed`: module -> version, None: not known."""
    if name == NONE or installed is None:
        return None
    package = PACKAGES[name]
    version, wanted = installed.get(package.module), f"(pip install '{package.wanted}')"
    if version is None:
        return f"{package.distribution} is not installed {wanted}"
    return None if package.knows(version) else f"how {package.distribution} {version} is called is not known {wanted}"


def precision_problem(name: str, precision: str) -> str | None:
    """Why kernels are not used in a precision; None: they are."""
    if name == NONE or precision in (package := PACKAGES[name]).precisions:
        return None
    return f"{package.title} is used in {' and '.join(package.precisions)}, not in {precision}: {package.why_precisions}"


def kernel_refusals(name: str, precision: str, kind: str, device: str, installed: Mapping[str, str] | None) -> list[Refusal]:
    """All that speaks against kernels on a device, by the names of the rules."""
    problems = {
        DEVICE_RULE: device_problem(name, kind, device),
        PACKAGE_RULE: package_problem(name, installed),
        PRECISION_RULE: precision_problem(name, precision),
    }
    return [Refusal(rule, problem, REMEDIES[rule]) for rule, problem in problems.items() if problem is not None]


def runs_on(name: str, kind: str, installed: Mapping[str, str] | None) -> bool:
    """Whether kernels are known to run there: what is searched without being asked for."""
    known = installed is not None and package_problem(name, installed) is None
    return name == NONE or (known and device_problem(name, kind, kind) is None)


def replaced(name: str, model: ModelSpec, tensor_parallel_size: int) -> frozenset[str]:
    """What of our modules the kernels take the place of.

    Liger rotates whole heads, has no LayerNorm that is better than torch's, gates by SiLU, and its loss holds the whole
    vocabulary, so that where tensor ranks divide that our own stays.
    """
    if name == NONE:
        return frozenset()
    if name == TRANSFORMER_ENGINE:
        return frozenset({NORM})
    found = {
        NORM: model.norm is Norm.RMSNORM,
        ROTATION: model.position is Position.ROTARY and model.rotary_fraction == 1,
        GATE: model.gated_mlp and model.activation == "silu",
        LOSS: tensor_parallel_size == 1,
    }
    return frozenset(what for what, holds in found.items() if holds)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
