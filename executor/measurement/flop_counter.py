"""FLOPs that this process really executes, counted operator by operator while they run."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Formula = Callable[..., int]
"""(arguments of the operator, `out_val`: its result) -> FLOPs."""

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""torch has no formula for the CPU's, and not every version counts grouped queries."""


_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn")
"""Elsewhere recurrent layers are matrix products."""


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Scores and mixed values of [batch, heads, tokens, width]; what a mask hides is counted too."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])


def attention_backward_flops(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: object, **___: object) -> int:
    """Five products: the scores again, the gradients of scores and values, of queries and keys [Dao et al. 2022, alg. 4]."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def recurrent_flops(x: Tensor, *weights: object, **__: object) -> int:
    """Layers of an LSTM, GRU or RNN in one operator, for x of […, inputs]: each matrix once for every row of x.

    `weights` are the further arguments of oneDNN's operator, its matrices among the first four, or of cuDNN's, where they are
    one list.
    """
    given = weights[0] if isinstance(weights[0], list | tuple) else weights[:4]
    matrices = sum(weight.numel() for weight in given if isinstance(weight, Tensor) and weight.dim() > 1)
    return 2 * (x.numel() // x.shape[-1]) * matrices


def recurrent_backward_flops(x: Tensor, *weights: object, **__: object) -> int:
    """The gradients of the matrices and of the rows."""
    return 2 * recurrent_flops(x, *weights)


def grouped_flops(one: Tensor, other: Tensor, *_: object, **__: object) -> int:
    """Rows [n, k] each times one of the matrices [groups, k, m]; or columns of [m, n] times rows of [n, k], group by group."""
    return 2 * one.shape[0] * one.shape[1] * other.shape[-1]


def _formulas() -> dict[Any, Formula]:
    """Operator -> formula: torch's for matrix products and convolutions, ours for attention and recurrent layers."""
    aten = torch.ops.aten
    ours: dict[Any, Formula] = {}
    attention, recurrent = (attention_flops, attention_backward_flops), (recurrent_flops, recurrent_backward_flops)
    for names, formulas in ((_ATTENTION, attention), (_RECURRENT, recurrent)):
        for name, suffix in itertools.product(names, ("", "_backward")):
            if hasattr(aten, name + suffix):
                ours[getattr(aten, name + suffix)] = formulas[bool(suffix)]
    return {**flop_registry, **ours, aten._grouped_mm: grouped_flops}


FORMULAS: Mapping[Any, Formula] = _formulas()


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As a context around a step: counts its FLOPs, two for each multiply-add, in forward, in backward and in what runs again.

    1. Every operator comes here on its way to its kernel, also from the threads in which autograd runs backward on a device:
       autograd takes the modes of the thread that called `backward` along [ATen/ThreadLocalState.h].
    2. Matrix products, convolutions, fused attention and recurrent layers count, by the shapes that this rank computes.
       Element-wise work does not: it is bound by memory, not by FLOPs.
    3. Tensors that wrap others (DTensor) are passed by: what they hold comes as operators of its own, in local shapes.

    `observe` is told the FLOPs of each operator, in the thread that runs it. Results are the same with a counter as without;
    a step takes longer, since every operator passes through Python.
    """

    supports_higher_order_operators = True

    def __init__(self, observe: Callable[[int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int | None = 0
        """FLOPs so far; None: an operator came whose FLOPs its formula could not tell."""
        self._observe = observe

    def __enter__(self) -> Self:
        # Under a mode torch.compile passes a function by, and from then on for good, also one that it had compiled.
        self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._eager.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        formula = FORMULAS.get(func if isinstance(func, HigherOrderOperator) else func._overloadpacket)
        if formula is None and torch.is_inference_mode_enabled() and not isinstance(func, HigherOrderOperator):
            # Only there operators that are made of others come whole: elsewhere autograd has taken them apart before.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if formula is not None:
            self._count(formula, args, kwargs, result)
        return result

    def _count(self, formula: Formula, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        try:
            flops = formula(*args, **kwargs, out_val=result)
        except Exception:  # shapes that the formula does not foresee: a trial must not end because it cannot be counted
            self.total = None
            return
        if self.total is not None:
            self.total += flops
        if self._observe is not None:
            self._observe(flops)
