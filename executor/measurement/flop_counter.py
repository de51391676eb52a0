"""Counts the FLOPs that this process actually executes, operator by operator while they run."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
"""torch has no formula for the CPU operator, and not every version counts grouped queries correctly."""


_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn")
"""On other backends recurrent layers are executed as matrix products."""


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Scores and weighted values of [batch, heads, tokens, width]; masked entries are counted too."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])


def attention_backward_flops(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: object, **___: object) -> int:
    """Five products: the recomputed scores, the gradients of scores, values, queries and keys [Dao et al. 2022, alg. 4]."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def recurrent_flops(x: Tensor, *weights: object, **__: object) -> int:
    """Layers of an LSTM, GRU or RNN in one operator, for x of […, inputs]: each matrix counts once for every row of x.

    `weights` are the further arguments of the operator: with oneDNN the matrices are among the first four, with cuDNN they are
    one list.
    """
    tensors = weights[0] if isinstance(weights[0], list | tuple) else weights[:4]
    matrices = sum(weight.numel() for weight in tensors if isinstance(weight, Tensor) and weight.dim() > 1)
    return 2 * (x.numel() // x.shape[-1]) * matrices


def recurrent_backward_flops(x: Tensor, *weights: object, **__: object) -> int:
    """The gradients of the matrices and of the rows."""
    return 2 * recurrent_flops(x, *weights)


def grouped_flops(left_operand: Tensor, right_operand: Tensor, *_: object, out_val: Tensor, **__: object) -> int:
    """Rows of [n, k] each times one of the matrices [groups, k, m]; or columns of [m, n] times rows of [n, k], by group."""
    if left_operand.dim() == right_operand.dim() == 2:
        return 2 * left_operand.numel() * right_operand.shape[-1]
    return 2 * out_val.numel() * left_operand.shape[-1]


def _bilinear_flops(*factors: object, **_: object) -> int:
    """`nn.Bilinear`: three factors, and for each the dimensions that are expanded; two products of all combinations."""
    tensors, expanded = factors[:3], factors[3:6]
    sizes = dict[int, int]()
    for tensor, missing in zip(tensors, expanded, strict=True):
        shape = iter(tensor.shape)  # type: ignore[attr-defined]
        for dimension in range(tensors[0].dim() + len(expanded[0])):  # type: ignore[attr-defined, arg-type]
            if dimension not in missing:  # type: ignore[operator]
                sizes[dimension] = next(shape)
    return 4 * math.prod(sizes.values())


def _formulas() -> dict[Any, Formula]:
    """Operator -> formula: torch's for matrix products and convolutions, ours for attention, recurrent layers and the rest."""
    aten = torch.ops.aten
    ours: dict[Any, Formula] = {
        aten._grouped_mm: grouped_flops,
        aten._trilinear: _bilinear_flops,
        aten.mv: lambda matrix, _, **__: 2 * matrix.numel(),
        aten.addmv: lambda _, matrix, *__, **___: 2 * matrix.numel(),
        aten.addbmm: lambda _, matrices, other, **__: 2 * matrices.numel() * other.shape[-1],
        **dict.fromkeys((aten.dot, aten.vdot), lambda vector, _, **__: 2 * vector.numel()),
    }
    attention, recurrent = (attention_flops, attention_backward_flops), (recurrent_flops, recurrent_backward_flops)
    for names, formulas in ((_ATTENTION, attention), (_RECURRENT, recurrent)):
        for name, suffix in itertools.product(names, ("", "_backward")):
            if hasattr(aten, name + suffix):
                ours[getattr(aten, name + suffix)] = formulas[bool(suffix)]
    return {**flop_registry, **ours}


FORMULAS: Mapping[Any, Formula] = _formulas()
_PRODUCTS = re.compile(
    r"(^|_)(\w*mm|\w*mv|v?dot|linear|bilinear|conv(?!ert)\w*|rnn|lstm|gru|attention|transformer|cdist|fft|linalg|cholesky|inverse|"
    r"solve|svd|qr|lu|eigh?|ormqr|geqrf|householder|matrix_exp)(_|$)"
)
"""Names of operators of torch that multiply matrices."""
_WITHOUT = re.compile(r"^_thnn_fused|_vector_norm$|_cross$|_powsum$|check_errors|flatten_weight$|slice_inverse")
"""Of them those that do not."""
_NAMESPACES = frozenset(
    (
        "aten",
        "prim",
        "prims",
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "profiler",
        "fsdp",
        "_dtensor",
        "streams",
    )
)
"""Namespaces of operators whose products are known by their names."""


@functools.cache
def formula_of(operator: Any) -> Formula | None:
    """The formula of an operator; None: it multiplies no matrices. One that may, and of which no formula is known, fails."""
    if isinstance(operator, HigherOrderOperator):
        return FORMULAS.get(operator, _unknown)
    namespace, _, name = operator._schema.name.partition("::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if namespace == "aten" else operator._overloadpacket
    if packet in FORMULAS:
        return FORMULAS[packet]
    multiplies = namespace not in _NAMESPACES or (namespace == "aten" and _PRODUCTS.search(name) and not _WITHOUT.search(name))
    return _unknown if multiplies else None


def _unknown(*_: object, **__: object) -> int:
    raise NotImplementedError


def count_flops(formula: Formula, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """FLOPs of one call of an operator; None: unknown, as it has no formula, or its formula does not fit the operands."""
    if any(leaf.layout is not torch.strided for leaf in tree_leaves(args) if isinstance(leaf, Tensor)):
        return None  # of a sparse factor most products are left out
    try:
        return formula(*args, **kwargs, out_val=result)
    except Exception:  # a trial must not fail because of the count
        return None


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that counts the FLOPs of a step, two for each multiply-add: forward, backward and recomputation.

    1. Every operator is dispatched to this mode before its kernel, also from the threads in which autograd runs backward on a
       device: autograd propagates the modes of the thread that called `backward` [ATen/ThreadLocalState.h].
    2. Matrix products, convolutions, fused attention and recurrent layers are counted, with the shapes of this rank.
       Element-wise operators are not: they are bound by memory, not by FLOPs. The total is unknown, never a part, if an
       operator has products and no formula: of another library, of a Fourier transform, of a sparse matrix.
    3. Tensors that wrap others (DTensor) are skipped: the wrapped tensors arrive as operators of their own, in local shapes.

    `observe` is called with the FLOPs of each operator, in the thread that runs it. The counter does not change results, but a
    step takes longer, because every operator passes through Python.
    """

    supports_higher_order_operators = True

    def __init__(self, observe: Callable[[int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int | None = 0
        """FLOPs so far; None: an operator multiplied matrices, and how many FLOPs that takes is unknown."""
        self._observe = observe
        self._stances: list[Any] = []
        """One for each time that the counter is entered: it enters itself again for the parts of a composite operator."""

    def __enter__(self) -> Self:
        # Under a dispatch mode torch.compile would skip a function permanently, even one that it had already compiled.
        self._stances.append(torch.compiler.set_stance("force_eager"))
        self._stances[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stances.pop().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        formula = formula_of(func)
        if (
            (formula is None or formula is _unknown)
            and torch.is_inference_mode_enabled()
            and not isinstance(func, HigherOrderOperator)
        ):
            # Only in inference mode do composite operators arrive whole: otherwise autograd has already decomposed them.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if formula is not None:
            flops = count_flops(formula, args, kwargs, result)
            self.total = None if flops is None or self.total is None else self.total + flops
            if self._observe is not None and flops is not None:
                self._observe(flops)
        return result
