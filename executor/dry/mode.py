"""The dispatch mode that every operator of a dry run passes, its fast path, and the memory of CUDA's fused RMSNorm."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from executor.dry.ledger import CommunicationBackend, Ledger
from executor.dry.operators import FULL_MESSAGE, Traffic, keep_sent_tensors, workspace_bytes
from executor.measurement.flop_counter import count_flops, formula_of
from executor.parallel.collectives import observed_by
from search_spaces.models.model import ModelSpec

_DEVICE = torch.ops.prim.device.default
_IN_PLACE = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
"""Operators that autograd calls for tensors of a subclass, as those without data are -> what it calls for others."""
READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operators that need the value of a tensor."""


def _is_of_autograd(value: Tensor, caller: FrameType) -> bool:
    """Whether autograd's own code has called an operator, and nothing else refers to its first argument.

    The references are those of autograd, of Python, and two of the call [counted, torch 2.13].
    """
    frame: FrameType | None = caller
    while frame is not None and frame.f_code.co_name in ("_fn", "inner", "__torch_dispatch__"):  # of dispatch modes
        frame = frame.f_back
    return (
        frame is not None
        and frame.f_code.co_name == "_engine_run_backward"
        and value._use_count() == 4  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(value.untyped_storage()._cdata) == 2
    )


class DryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs above `FakeTensorMode`: sees every operator below autograd and records memory, FLOPs and traffic in one pass.

    1. Tensors that wrap others (DTensor) are skipped: the wrapped tensors arrive as operators of their own, in local shapes.
    2. An optimizer that reads its step counter gets the value 1, as does torch's pipeline schedule, whose shapes are stated.
       The experts of our own model all get equally many tokens. Elsewhere, reading a value is an error.
    3. A collective allocates what its backend would allocate for itself, until the engine has waited for it (`started`).
    """

    supports_higher_order_operators = True

    def __init__(self, backend: CommunicationBackend, spec: ModelSpec | None = None) -> None:
        """`spec`: the specification of our own model; None: the module is the user's."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.backend, self.ledger, self.traffic = backend, Ledger(backend.rounding_bytes), Traffic()
        self.device_kind = backend.device_kind
        """The kind whose workspaces of kernels are allocated."""
        self.flops: int | None = 0
        self.running_modules: list[nn.Module] = []
        self.reader: nn.Module | None = None
        """The innermost module that ran when a value was read."""
        # In steps of our own model only torch reads values, and accepts 1.
        self._returns_values = int(spec is not None)
        self._copy: object = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # queried by every operator in C++: by far the most frequent call
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._returns_values and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func in _IN_PLACE and not torch.is_grad_enabled() and _is_of_autograd(args[0], sys._getframe(1)):
            func = _IN_PLACE[func]
        substitute = quick if func in QUICK else _SUBSTITUTES.get(func)
        result = NotImplemented if substitute is None else substitute(func, args, kwargs)
        if result is NotImplemented:
            try:
                result = func(*args, **kwargs)
            except READS_VALUES:
                self.reader = self.running_modules[-1] if self.running_modules else None
                raise
        formula, flops = formula_of(func), None
        if formula is not None:
            flops = count_flops(formula, args, kwargs, result)
            self.flops = None if flops is None or self.flops is None else self.flops + flops
        elif getattr(func, "namespace", "") in ("c10d", "_c10d_functional") and func._schema.name in FULL_MESSAGE:
            operation, size = self.traffic.add(func, args, kwargs, result)
            self._copy = self.ledger.allocate(size, "buffers") if operation in self.backend.copies else None
        self._track(result)
        if formula is not None and self.device_kind == "cpu" and (size := workspace_bytes(func._overloadpacket, args, flops)):
            self.ledger.allocate(size, "activations")  # released at once
        return result

    def marked(self, tag: str, value: Tensor) -> None:
        """See `Observer`."""
        self.ledger.mark(tag, value)

    def rows(self, counts: Tensor, total: int) -> list[int]:
        """Distribute the `total` rows evenly over the experts."""
        shares = counts.numel()
        return [(share + 1) * total // shares - share * total // shares for share in range(shares)]

    def started(self) -> object:
        """Return what the backend has allocated for the collective that was just started."""
        copy, self._copy = self._copy, None
        return copy

    @contextmanager
    def running(self) -> Iterator[None]:
        """Intercept all operators inside the block, and also the changes of memory that no operator reports."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.ledger.resized(storage)
            return result

        state = torch.get_rng_state

        def kept_state() -> Tensor:
            """Track the state, because checkpointing keeps one for each region."""
            rng_state = state()
            self.ledger.track(rng_state)
            return rng_state

        def enter(module: nn.Module, _: object) -> None:
            self.running_modules.append(module)

        def leave(module: nn.Module, *_: object) -> None:
            while self.running_modules and self.running_modules.pop() is not module:
                pass

        hooks = (
            register_optimizer_step_pre_hook(functools.partial(self._change_updates, 1)),
            register_optimizer_step_post_hook(functools.partial(self._change_updates, -1)),
            register_module_forward_pre_hook(enter), register_module_forward_hook(leave),
        )  # fmt: skip
        try:
            with (
                patch.object(torch.UntypedStorage, "resize_", resized),
                patch.object(torch, "get_rng_state", kept_state if self.backend.device_kind == "cpu" else state),
                patch.object(nn.Module, "_apply", _apply),
                patch.object(FakeTensor, "__deepcopy__", _deepcopy),
                patch.object(functional, "rms_norm", rms_norm if self.backend.device_kind == "cuda" else functional.rms_norm),
                keep_sent_tensors(),
                observed_by(self),
                self,
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _track(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self.ledger.track(result)
        elif isinstance(result, list | tuple):
            for part in result:
                self._track(part)

    def _change_updates(self, change: int, *_: Any) -> None:
        self._returns_values += change


def _deepcopy(value: FakeTensor, memo: dict[Any, Any]) -> Tensor:
    """Replace `Tensor.__deepcopy__`, whose copies of storages without data belong to no fake tensor. As there, parameters are
    copied alone, and other tensors that share a storage share its copy."""
    if id(value) in memo:
        copied: Tensor = memo[id(value)]
        return copied
    if not value.is_leaf:
        return super(FakeTensor, value).__deepcopy__(memo)  # type: ignore[no-any-return, no-untyped-call]  # raises torch's own error
    with torch.no_grad():
        if isinstance(value, nn.Parameter):
            copied = nn.Parameter(torch.empty_like(value), value.requires_grad)
        else:
            storage, storages = value.untyped_storage(), memo.setdefault("torch", {})
            if storage._cdata not in storages:
                storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=value.device)
            whole = storages[storage._cdata].view(value.dtype)
            copied = whole.as_strided(value.shape, value.stride(), value.storage_offset()).detach()
            copied.requires_grad_(value.requires_grad)
    memo[id(value)] = copied
    return copied


def _apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace `nn.Module._apply`: torch's own swaps the contents of a fake parameter, which a weak reference forbids."""
    for child in module.children() if recurse else ():
        _apply(child, convert)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            converted = convert(parameter)
        if converted is parameter:
            continue
        if converted.device == parameter.device:
            parameter.data = converted
        else:
            module._parameters[name] = nn.Parameter(converted, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


_parts = functional.rms_norm


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """`functional.rms_norm` as CUDA computes it [aten, layer_norm_kernel.cu]: besides its input it keeps one number per row.
    A weight of another dtype than the input's is multiplied by operators there too.
    """
    if weight is not None and weight.dtype != x.dtype:
        return _parts(x, list(normalized_shape), weight, eps)
    result: Tensor = _Fused.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


class _Fused(torch.autograd.Function):
    """Allocates what the kernel does, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dimensions: int) -> Tensor:
        rows = torch.empty(x.shape[:-dimensions], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        x, weight = saved[:2]
        needed = ctx.needs_input_grad
        return (
            torch.empty_like(x) if needed[0] and x is not None else None,
            torch.empty_like(weight) if needed[1] and weight is not None else None,
            None,
        )


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


def _grouped(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Products by group, which torch refuses without data in other types than bf16; on devices it has them in every type."""
    arguments = {spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    first, second = arguments["self"], arguments["mat2"]
    groups = arguments["offs"].numel() if first.dim() == second.dim() == 2 else first.shape[0]
    shape = (first.shape[-2], second.shape[-1]) if first.dim() != second.dim() else (groups, first.shape[-2], second.shape[-1])
    return first.new_empty(shape, dtype=arguments.get("out_dtype") or first.dtype)


def _recurrent(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A recurrent layer of oneDNN with the workspace that it keeps for backward, of which torch says nothing without data."""
    *results, workspace = func(*args, **kwargs)
    *_, trains = args
    if trains:
        operands = tuple((tuple(value.shape[1:] if value is args[0] else value.shape), value.dtype) if isinstance(value, Tensor)
                         else tuple(value) if isinstance(value, list) else value for value in args)  # fmt: skip
        steps, few = len(args[0]), 64
        size = _recurrent_workspace(func, operands, min(steps, few))
        if steps > few:
            size += (size - _recurrent_workspace(func, operands, few // 2)) * (steps - few) // (few // 2)
        workspace = workspace.new_empty(size)
    return (*results, workspace)


@functools.cache
def _recurrent_workspace(func: Any, operands: tuple[Any, ...], steps: int) -> int:
    """Bytes that oneDNN asks for, found by running the layer on zeros; beyond a few steps they are affine in the steps."""
    with unset_fake_temporarily():
        (row, dtype), *others = operands
        values = (torch.zeros(value[0], dtype=value[1]) if isinstance(value, tuple) and value else list(value) if value == ()
                  else value for value in others)  # fmt: skip
        return int(func(torch.zeros(steps, *row, dtype=dtype), *values)[-1].numel())


_SUBSTITUTES = {aten._grouped_mm.default: _grouped, aten.mkldnn_rnn_layer.default: _recurrent}
"""Operators of which torch's own results without data are wrong."""


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
