"""A fast path for the most frequent operators: `FakeTensorMode` spends most of a dry run on lookups in its cache."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten

QUICK: frozenset[Any] = frozenset(
    {
        # Views.
        aten.alias.default, aten.detach.default, aten.expand.default, aten.permute.default, aten.select.int, aten.slice.Tensor,
        aten.split.Tensor, aten.squeeze.dim, aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.view.default,
        aten._unsafe_view.default, aten.split_with_sizes.default,
        # In place.
        aten.add_.Tensor, aten.copy_.default, aten.div_.Tensor, aten.mul_.Tensor, aten.zero_.default,
        aten.exp_.default, aten.scatter_add_.default,
        # New tensors.
        aten.add.Tensor, aten.addmm.default, aten.bmm.default, aten.clone.default, aten._to_copy.default, aten.mean.dim,
        aten.mm.default,
        aten.mul.Scalar, aten.mul.Tensor, aten.neg.default, aten.pow.Tensor_Scalar, aten.rsqrt.default, aten.silu.default,
        aten.silu_backward.default, aten.sub.Tensor, aten.sum.dim_IntList, aten.amax.default, aten.bitwise_or.Tensor,
        aten.div.Scalar, aten.div.Tensor, aten.ge.Scalar, aten.gather.default, aten.log.default, aten.lt.Scalar,
        aten.masked_fill.Scalar, aten.sub.Scalar,
    }
)  # fmt: skip
"""Operators whose results have the shapes and strides of torch's own meta kernels."""

_CPU = torch.device("cpu")


def quick(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what `FakeTensorMode` would return for an operator of `QUICK`; NotImplemented if the mode itself must run it.

    A view shares its storage with its base, as a real one does. FakeTensorMode's cache would create it by `set_`, which
    restores the size of a storage that was emptied (`UntypedStorage.resize_`).
    """
    mode: FakeTensorMode | None = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, FakeTensor) and value.fake_device == _CPU:
            mode = value.fake_mode
        elif isinstance(value, Tensor):
            return NotImplemented
    if mode is None or kwargs.get("device") is not None:
        return NotImplemented
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    return _wrapped(result, mode)


def _wrapped(result: Any, mode: FakeTensorMode) -> Any:
    if isinstance(result, FakeTensor):
        return result
    if isinstance(result, Tensor):
        return FakeTensor(mode, result, _CPU)
    return type(result)(_wrapped(part, mode) for part in result)
