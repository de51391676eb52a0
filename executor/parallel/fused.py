"""Fused kernels of third-party packages as our operators: Liger's, Transformer Engine's norms, and their loading."""

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from executor.errors import EngineRefusalError
from executor.parallel.block_collectives import in_compiled_blocks
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

LIGER_OPERATIONS = "liger_kernel.ops"
NORM_SETTINGS = (0.0, "gemma", False)
"""Offset, casting mode, in place: this mode computes in fp32 up to and including the weight, as torch's norm does."""
Function = Any
"""The class of an autograd function; torch.compile traces `apply` only if it is called on the class."""


@dataclass(frozen=True, slots=True)
class LigerFunctions:
    """The autograd functions of `LIGER_OPERATIONS`."""

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

    In compiled blocks each is one operator (`in_compiled_blocks`), because the compiler cannot look into it; what a kernel
    overwrites is copied for it. The loss is outside of blocks.

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
        if ROTATION not in self._replaces:
            return super().rotate(query, key, cosines, sines)
        # One row for all samples, or for packed samples one row each: [samples, tokens, head_dim].
        tables = (table[None] if table.dim() == 2 else table[:, 0] for table in (cosines, sines))
        function = _Rotation if torch.compiler.is_compiling() else self._functions.rotate
        rotated: tuple[Tensor, Tensor] = function.apply(query, key, *tables)
        return rotated

    def gate(self, gate: Tensor, hidden: Tensor, kind: str) -> Tensor:
        if GATE not in self._replaces:
            return super().gate(gate, hidden, kind)
        function = _Gate if torch.compiler.is_compiling() else self._functions.gate
        gated: Tensor = function.apply(gate.contiguous(), hidden.contiguous())
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
            compiled: Tensor = _RowNorm.apply(x.contiguous(), self.weight, self.eps)  # type: ignore[no-untyped-call]
            return compiled
        normed: Tensor = self._function.apply(x.contiguous(), self.weight, self.eps, *NORM_SETTINGS)
        return normed


class _Context:
    """The context of one of Liger's functions that is called by an operator, without autograd."""

    _settings: ClassVar[dict[tuple[Any, ...], dict[str, Any]]] = {}
    """Function and shape -> what forward leaves for backward besides tensors."""

    def __init__(
        self, name: str, x: Tensor, saved_tensors: Sequence[Tensor] = (), needs_input_grad: Sequence[bool] = ()
    ) -> None:
        self._key = (name, x.shape, x.dtype, x.device)
        self.__dict__.update(self._settings.get(self._key, {}))
        self.saved_tensors, self.needs_input_grad = saved_tensors, needs_input_grad
        self.function: Function = getattr(importlib.import_module(LIGER_OPERATIONS), name)

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def forward(self, *arguments: Any) -> Any:
        result = self.function.forward(self, *arguments)
        self._settings[self._key] = {name: value for name, value in vars(self).items() if name not in ("saved_tensors", "_key")}
        return result


@in_compiled_blocks(
    "Tensor x, Tensor weight, float epsilon",
    lambda x, *_: [torch.empty_like(x), x.new_empty(x.shape[:-1].numel(), dtype=torch.promote_types(x.dtype, torch.float32))],
    "Tensor[]",
)
def _norm_rows(x: Tensor, weight: Tensor, epsilon: float) -> list[Tensor]:
    """The norm and a number for each row."""
    context = _Context("LigerRMSNormFunction", x)
    normed = context.forward(x, weight, epsilon, *NORM_SETTINGS)
    return [normed, context.saved_tensors[-1]]


@in_compiled_blocks(
    "Tensor gradient, Tensor x, Tensor weight, Tensor numbers, bool trains",
    lambda _, x, weight, *__: [torch.empty_like(x), torch.empty_like(weight)],
    "Tensor[]",
)
def _norm_gradients(gradient: Tensor, x: Tensor, weight: Tensor, numbers: Tensor, trains: bool) -> list[Tensor]:
    saved_tensors = (x.view(-1, x.shape[-1]), weight, numbers)
    context = _Context("LigerRMSNormFunction", x, saved_tensors, (True, trains))
    of_input, of_weight, *_ = context.function.backward(context, gradient)
    return [of_input, torch.zeros_like(weight) if of_weight is None else of_weight]


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normed, numbers = _norm_rows(x, weight, epsilon)
        ctx.save_for_backward(x, weight, numbers)
        result: Tensor = normed
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_input, of_weight = _norm_gradients(gradients[0].contiguous(), *ctx.saved_tensors, ctx.needs_input_grad[1])
        return of_input, of_weight if ctx.needs_input_grad[1] else None, None


@in_compiled_blocks(
    "Tensor query, Tensor key, Tensor cosines, Tensor sines, bool back",
    lambda query, key, *_: [_by_token(query), _by_token(key)],
    "Tensor[]",
)
def _rotate(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> list[Tensor]:
    context = _Context("LigerRopeFunction", query, (cosines, sines))
    pair = _by_token(query).copy_(query), _by_token(key).copy_(key)
    if back:
        return [*context.function.backward(context, *pair)[:2]]
    return [*context.forward(*pair, cosines, sines)]


def _by_token(x: Tensor) -> Tensor:
    """An empty tensor of the shape of x [batch, heads, tokens, head_dim], of which each token's heads are contiguous."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosines, sines)
        query, key = _rotate(query, key, cosines, sines, False)
        return query, key

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotate(*gradients, *ctx.saved_tensors, True), None, None


@in_compiled_blocks("Tensor gate, Tensor hidden", lambda gate, _: torch.empty_like(gate))
def _gated(gate: Tensor, hidden: Tensor) -> Tensor:
    gated: Tensor = _Context("LigerSiLUMulFunction", gate).forward(gate, hidden)
    return gated


@in_compiled_blocks(
    "Tensor gradient, Tensor gate, Tensor hidden", lambda _, *pair: [torch.empty_like(value) for value in pair], "Tensor[]"
)
def _gate_gradients(gradient: Tensor, gate: Tensor, hidden: Tensor) -> list[Tensor]:
    context = _Context("LigerSiLUMulFunction", gate, (gate.clone(), hidden.clone()))
    return [*context.function.backward(context, gradient)[:2]]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(gate, hidden)
        gated: Tensor = _gated(gate, hidden)
        return gated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        of_gate, of_hidden = _gate_gradients(gradients[0].contiguous(), *ctx.saved_tensors)
        return of_gate, of_hidden


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
        ops = _imported(name, LIGER_OPERATIONS)
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
