"""Which results a selectively checkpointed block keeps: those of dear operators and of collectives."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

KEPT: frozenset[Any] = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.convolution.default,
        aten._grouped_mm.default,
        aten._scaled_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.higher_order.flex_attention,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)
"""Operators whose results are kept: matrix products, fused attention, functional collectives (those of a user's DTensors).

As in torchtitan's `distributed/activation_checkpoint.py`, but that every matrix product is kept, not every second one.
`bmm` is left out: unfused attention makes its scores with it, which are large and cheap [Korthikanti et al. 2022, 5].
"""

_OVERWRITING: frozenset[Any] = frozenset({torch.ops.c10d.allreduce_.default, torch.ops.c10d.broadcast_.default})


class Region:
    """What one call of a block keeps from forward for the run in backward, in the order in which it was made."""

    def __init__(self, runs_again: bool) -> None:
        self.runs_again = runs_again
        """Whether backward comes in parts that each run the block, so that what was recalled must stay."""
        self.in_forward = True
        self.in_collective = False
        self._kept: list[tuple[object, Any, list[int]] | None] = []
        self._storages: set[int] = set()
        self._next = 0

    def keep(self, key: object, result: Any) -> None:
        """Keep `result` (a tensor or a tree with tensors) of what `key` stands for."""
        kept = tree_map_only(Tensor, _detached, result)
        tensors = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]
        self._kept.append((key, kept, [tensor._version for tensor in tensors]))
        self._storages.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def rewind(self) -> None:
        """Begin to recall from the first result."""
        self._next = 0

    def recall(self, key: object) -> Any:
        """The next kept result.

        Raises:
            RuntimeError: the block runs otherwise than in forward, or a kept result was overwritten since.
        """
        index, self._next = self._next, self._next + 1
        entry = self._kept[index] if index < len(self._kept) else None
        if entry is None or entry[0] is not key:
            raise RuntimeError(
                f"a selectively checkpointed block came to {key} in backward, where forward did not; "
                "use activation_checkpointing=full or none for a module that does not run the same way twice"
            )
        if not self.runs_again:
            self._kept[index] = None
        _, kept, versions = entry
        tensors = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]
        if [tensor._version for tensor in tensors] != versions:
            raise RuntimeError(
                f"the result of {key} was changed in place after a selectively checkpointed block had kept it; "
                "make the change out of place, or use activation_checkpointing=full or none"
            )
        return tree_map_only(Tensor, _detached, kept) if self.runs_again else kept

    def check_overwritten(self, tensors: list[Tensor]) -> None:
        """Refuse an in-place collective on a kept result: it would run a second time on what it has already reduced."""
        if not self.in_collective and any(tensor.untyped_storage()._cdata in self._storages for tensor in tensors):
            raise RuntimeError(
                "a collective overwrites a result that a checkpointed block keeps; call it through keep_collective"
            )


_active: ContextVar[Region | None] = ContextVar("selective_region", default=None)


def keep_collective(compute: Callable[[], Tensor]) -> Tensor:
    """The result of `compute`, which exchanges data between ranks and holds no operator of `KEPT`.

    Inside a selectively checkpointed block the result is kept, so that it is exchanged once, on every rank alike, and not
    again in backward; elsewhere this is a plain call. `compute` may overwrite a kept operator's result: what that operator
    then recalls is the exchanged value, and so is what this recalls.
    """
    region = _active.get()
    if region is None:
        return compute()
    if not region.in_forward:
        recalled: Tensor = region.recall(keep_collective)
        return recalled
    region.in_collective = True
    try:
        result = compute()
    finally:
        region.in_collective = False
    region.keep(keep_collective, result)
    return result


def selective_contexts(runs_again: bool) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The contexts of one call of a block, in forward and when it runs again, for `torch.utils.checkpoint.checkpoint`.

    torch's own `create_selective_checkpoint_contexts` gives a kept result out once, so that zero-bubble schedules, whose
    backward comes in several parts, fail with it; and it takes no account of a collective that overwrites what it keeps.
    """
    region = Region(runs_again)
    return _Keeping(region), _Recalling(region)


class _RegionMode(TorchDispatchMode):
    """Sees every operator below autograd, and makes the region the active one."""

    supports_higher_order_operators = True

    def __init__(self, region: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.region = region
        self._tokens: list[Token[Region | None]] = []

    def __enter__(self) -> Any:
        self._tokens.append(_active.set(self.region))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _active.reset(self._tokens.pop())
        super().__exit__(*error)  # type: ignore[no-untyped-call]


class _Keeping(_RegionMode):  # type: ignore[no-untyped-call]
    """Forward: run everything, keep the results of `KEPT`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OVERWRITING:
            self.region.check_overwritten(args[0])
        result = func(*args, **(kwargs or {}))
        if func in KEPT:
            self.region.keep(func, result)
        return result


class _Recalling(_RegionMode):  # type: ignore[no-untyped-call]
    """Backward: run everything again but `KEPT`."""

    def __enter__(self) -> Any:
        self.region.in_forward = False
        self.region.rewind()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.region.recall(func) if func in KEPT else func(*args, **(kwargs or {}))


def _detached(value: Tensor) -> Tensor:
    """The same memory and version counter, apart from the graph: the original would hold its own graph alive."""
    # Below autograd an alias has its own version counter unless this key takes part.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()
