"""Fused kernels of third-party packages as our operators: Liger's, Transformer Engine's norms, and their loading."""

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.errors import EngineRefusalError
from executor.parallel.operators import Operators
from search_spaces.kernels import (
    GATE,
    LIGER,
    LOSS,
    NONE,
    NORM,
    OFF,
    PACKAGE_RULE,
    PACKAGES,
    ROTATION,
    installed_kernels,
    kernel_refusals,
    replaced,
)
from search_spaces.models.model import ModelSpec, Norm
from search_spaces.trial_config import TrialConfig

Function = Any
"""The class of an autograd function; torch.compile traces `apply` only if it is called on the class."""


@dataclass(frozen=True, slots=True)
class LigerFunctions:
    """The autograd functions of liger_kernel.ops."""

    norm: Function
    rotate: Function
    gate: Function
    linear_loss: Function


class LigerOperators(Operators):
    """Operators by Liger's kernels. According to their source, they do the following to their tensors:

    | kernel | forward | backward |
    |---|---|---|
    | norm | saves the input and a number per row | allocates a new gradient: `in_place` is off, as others may read the old |
    | rotation | **overwrites** queries and keys | overwrites their gradients |
    | gate | saves only gate and hidden | **overwrites** both with their gradients |
    | loss | computes logits some rows at a time, saves the gradients of rows and weight | multiplies these in place |

    In compiled blocks torch's operators run in their place, which the compiler fuses with what is around them; the loss is
    outside of blocks.

    So a forward cannot run again on the inputs of an earlier run (selective checkpointing reuses saved products), and a
    backward cannot run twice (zero-bubble schedules): rules refuse both (`executor.engines.capabilities`).
    """

    def __init__(self, functions: LigerFunctions, replaces: Collection[str]) -> None:
        self._functions, self._replaces = functions, replaces
        if LOSS in replaces:
            self.linear_loss = self._summed_loss

    def make_norm(self, spec: ModelSpec, width: int = 0) -> nn.Module:
        if NORM not in self._replaces or width:
            return super().make_norm(spec, width)
        return _Norm(spec.hidden_size, spec.norm_epsilon, self._functions.norm)

    def rotate(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        if ROTATION not in self._replaces or torch.compiler.is_compiling():
            return super().rotate(query, key, cosines, sines)
        # One row for all samples, or for packed samples one row each: [samples, tokens, head_dim].
        tables = (table[None] if table.dim() == 2 else table[:, 0] for table in (cosines, sines))
        rotated: tuple[Tensor, Tensor] = self._functions.rotate.apply(query, key, *tables)
        return rotated

    def gate(self, gate: Tensor, hidden: Tensor, kind: str) -> Tensor:
        if GATE not in self._replaces or torch.compiler.is_compiling():
            return super().gate(gate, hidden, kind)
        gated: Tensor = self._functions.gate.apply(gate.contiguous(), hidden.contiguous())
        return gated

    def _summed_loss(self, rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Summed loss. Weight gradients are accumulated over chunks of rows in fp32, as in a single product."""
        narrow = weight.dtype.itemsize < torch.float32.itemsize
        # The ignored label, as in torch's cross-entropy.
        loss: Tensor = self._functions.linear_loss.apply(
            rows.contiguous(), weight, targets.contiguous(), None, None, -100, 0.0, 0.0, "sum", None, False,
            torch.float32 if narrow else None,
        )[0]  # fmt: skip
        return loss


class _Norm(nn.RMSNorm):
    def __init__(self, width: int, epsilon: float, function: Function) -> None:
        super().__init__(width, eps=epsilon)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x)
        # "gemma": the casting mode that computes in fp32 up to and including the weight, as torch's norm does.
        normed: Tensor = self._function.apply(x.contiguous(), self.weight, self.eps, 0.0, "gemma", False)
        return normed


class TransformerEngineOperators(Operators):
    """Transformer Engine's norm modules, whose `weight` and `bias` have the same names as torch's.

    They save the input and some numbers per row, compute in fp32, and overwrite nothing; a second backward fails. Its matrix
    products and attention are not used, because they come with their own tensor parallelism and gradients.
    """

    def __init__(self, rms_norm: Callable[..., Any], layer_norm: Callable[..., Any], dtype: torch.dtype) -> None:
        """`dtype`: of the model. In the first releases a norm keeps the dtype that it was created with."""
        self._kinds, self._dtype = {Norm.RMSNORM: rms_norm, Norm.LAYERNORM: layer_norm}, dtype

    def make_norm(self, spec: ModelSpec, width: int = 0) -> nn.Module:
        if width or spec.zero_centered_norms:
            return super().make_norm(spec, width)
        kind = self._kinds[spec.norm]
        norm: nn.Module = kind(spec.hidden_size, eps=spec.norm_epsilon, device=torch.get_default_device(), dtype=self._dtype)
        return norm


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
    """A norm class whose arguments are a width, eps, device and dtype."""
    norm_class = getattr(module, name, None)
    # Keyword arguments of norms of transformer_engine.pytorch, after the width.
    norm_arguments = ("eps", "device", "dtype")
    try:
        inspect.signature(norm_class).bind(1, **dict.fromkeys(norm_arguments))  # type: ignore[arg-type]
    except TypeError:
        norm_class = None
    _require(norm_class is not None, f"{module.__name__}.{name}", f"a width and {', '.join(norm_arguments)}")
    kind: Callable[..., Any] = norm_class  # type: ignore[assignment]
    return kind


def _require(holds: bool, item: str, arguments: str) -> None:
    if not holds:
        problem = f"{item} is missing, or does not take {arguments}"
        raise EngineRefusalError(PACKAGE_RULE, f"{problem}; install a release that does, or {OFF}")
