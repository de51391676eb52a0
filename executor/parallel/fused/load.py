"""Loads the operators that a configuration names from the installed package of fused kernels."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from executor.errors import EngineRefusalError
from executor.parallel.fused.liger import LigerFunctions, LigerOperators
from executor.parallel.fused.transformer_engine import TransformerEngineOperators
from executor.parallel.operators import Operators
from search_spaces.kernels import (
    LIGER,
    NONE,
    OFF,
    PACKAGE_RULE,
    PACKAGES,
    installed_kernels,
    kernel_refusals,
    replaced,
)
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

LIGER_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "LigerRMSNormFunction": ("X", "W", "eps", "offset", "casting_mode", "in_place"),
    "LigerRopeFunction": ("q", "k", "cos", "sin"),
    "LigerSiLUMulFunction": ("a", "b"),
    "LigerFusedLinearCrossEntropyFunction": (
        "_input", "weight", "target", "bias", "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing", "reduction",
        "softcap", "return_z_loss", "accum_dtype",
    ),
}  # fmt: skip
"""Function of liger_kernel.ops -> the first arguments of its forward, which are passed by position."""
NORM_ARGUMENTS = ("eps", "device", "dtype")
"""Keyword arguments of norms of transformer_engine.pytorch, after the width."""


def load_operators(config: TrialConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Operators:
    """The operators of our modules on this rank.

    Raises:
        EngineRefusalError: the package is missing, or its release, its arguments, the device or the precision is not supported.
    """
    name = config.fused_kernels
    if name == NONE:
        return Operators()
    for refusal in kernel_refusals(name, config.precision, device.type, f"{device.type} devices", installed_kernels()):
        raise EngineRefusalError(refusal.rule, f"{refusal.message}; {refusal.remedy}")
    replaces = replaced(name, spec, config.tensor_parallel_size)
    if name == LIGER:
        ops = _imported(name, "liger_kernel.ops")
        functions = (_function(ops, function, arguments) for function, arguments in LIGER_ARGUMENTS.items())
        return LigerOperators(LigerFunctions(*functions), replaces)
    norms = _imported(name, "transformer_engine.pytorch")
    return TransformerEngineOperators(_norm(norms, "RMSNorm"), _norm(norms, "LayerNorm"), dtype)


def _imported(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = f"{module} of {PACKAGES[name].distribution} cannot be imported here ({error})"
        raise EngineRefusalError(PACKAGE_RULE, f"{problem}; repair it, or {OFF}") from error


def _function(module: Any, name: str, expected: Sequence[str]) -> Any:
    """An autograd function whose forward takes these arguments first."""
    function = getattr(module, name, None)
    parameters = [] if function is None else [*inspect.signature(function.forward).parameters][1:]  # without the context
    _require(parameters[: len(expected)] == [*expected], f"{module.__name__}.{name}", f"{', '.join(expected)} first")
    return function


def _norm(module: Any, name: str) -> Callable[..., Any]:
    """A norm class whose arguments are a width and `NORM_ARGUMENTS`."""
    norm_class = getattr(module, name, None)
    try:
        inspect.signature(norm_class).bind(1, **dict.fromkeys(NORM_ARGUMENTS))  # type: ignore[arg-type]
    except TypeError:
        norm_class = None
    _require(norm_class is not None, f"{module.__name__}.{name}", f"a width and {', '.join(NORM_ARGUMENTS)}")
    kind: Callable[..., Any] = norm_class  # type: ignore[assignment]
    return kind


def _require(holds: bool, item: str, arguments: str) -> None:
    if not holds:
        problem = f"{item} is missing, or does not take {arguments}"
        raise EngineRefusalError(PACKAGE_RULE, f"{problem}; install a release that does, or {OFF}")
