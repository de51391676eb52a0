"""The dispatch mode through which every operator of a dry run passes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from executor.dry.backends import Backend
from executor.dry.flops import FORMULAS
from executor.dry.ledger import Ledger
from executor.dry.norms import rms_norm
from executor.dry.products import workspace_bytes
from executor.dry.quick import QUICK, quick
from executor.dry.sends import keep_sent_tensors
from executor.dry.traffic import FULL_MESSAGE, Traffic
from executor.parallel.collectives import observed_by
from search_spaces.models.model import ModelSpec

_DEVICE = torch.ops.prim.device.default


class DryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs above `FakeTensorMode`: sees every operator below autograd and records memory, FLOPs and traffic in one pass.

    1. Tensors that wrap others (DTensor) are skipped: the wrapped tensors arrive as operators of their own, in local shapes.
    2. An optimizer that reads its step counter gets the value 1, as does torch's pipeline schedule, whose shapes are stated.
       The experts of our own model all get equally many tokens. Elsewhere, reading a value is an error.
    3. A collective allocates what its backend would allocate for itself, until the engine has waited for it (`started`).
    """

    supports_higher_order_operators = True

    def __init__(self, backend: Backend, spec: ModelSpec | None = None) -> None:
        """`spec`: the specification of our own model; None: the module is the user's."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.backend, self.ledger, self.traffic = backend, Ledger(backend.rounding_bytes), Traffic()
        self.flops: int | None = 0
        # In steps of our own model only torch reads values, and accepts 1.
        self._returns_values = int(spec is not None)
        self._copy: object = None
        self._formulas: dict[Any, Callable[..., int] | None] = {}

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
        if func not in self._formulas:
            self._formulas[func] = FORMULAS.get(getattr(func, "_overloadpacket", func))
        result = quick(func, args, kwargs) if func in QUICK else NotImplemented
        if result is NotImplemented:
            result = func(*args, **kwargs)
        formula = self._formulas[func]
        if formula is not None:
            self._count(formula, args, kwargs, result)
        elif getattr(func, "namespace", "") in ("c10d", "_c10d_functional") and func._schema.name in FULL_MESSAGE:
            operation, size = self.traffic.add(func, args, kwargs, result)
            self._copy = self.ledger.allocate(size, "buffers") if operation in self.backend.copies else None
        self._track(result)
        if formula is not None and self.backend.device_kind == "cpu" and (size := workspace_bytes(func._overloadpacket, args)):
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
            kept = state()
            self.ledger.track(kept)
            return kept

        hooks = register_optimizer_step_pre_hook(self._begin_update), register_optimizer_step_post_hook(self._end_update)
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

    def _count(self, formula: Callable[..., int], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        try:
            flops = formula(*args, **kwargs, out_val=result)
        except Exception:  # as in the measurement, the FLOPs are then reported as unknown
            self.flops = None
            return
        if self.flops is not None:
            self.flops += flops

    def _begin_update(self, *_: Any) -> None:
        self._returns_values += 1

    def _end_update(self, *_: Any) -> None:
        self._returns_values -= 1


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
