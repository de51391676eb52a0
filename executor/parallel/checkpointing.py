"""Activation checkpointing: whole blocks, or selective, which keeps results of expensive operators and collectives."""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES, recomputed_layers
from search_spaces.trial_config import TrialConfig

aten = torch.ops.aten
NAMESPACE = "autotune"
"""Namespace of the operators of collectives in compiled blocks."""

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

As in torchtitan's `distributed/activation_checkpoint.py`, except that every matrix product is kept, not every second one.
`bmm` is not kept: unfused attention computes its scores with it, which are large and cheap [Korthikanti et al. 2022, 5].
"""

_OVERWRITING: frozenset[Any] = frozenset({torch.ops.c10d.allreduce_.default, torch.ops.c10d.broadcast_.default})


class Region:
    """The results that one call of a block keeps in forward for its recomputation in backward, in order of creation."""

    def __init__(self, runs_again: bool) -> None:
        self.runs_again = runs_again
        """Whether backward has several parts that each recompute the block, so that recalled results must be kept."""
        self.in_forward = True
        self.in_collective = False
        self._kept: list[tuple[object, Any, list[int]] | None] = []
        self._storages: set[int] = set()
        self._next = 0

    def keep(self, key: object, result: Any) -> None:
        """Keep `result` (a tensor or a tree with tensors) of the operation `key`."""
        detached = tree_map_only(Tensor, _detached, result)
        tensors = [leaf for leaf in tree_leaves(detached) if isinstance(leaf, Tensor)]
        self._kept.append((key, detached, [tensor._version for tensor in tensors]))
        self._storages.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def rewind(self) -> None:
        """Restart at the first result."""
        self._next = 0

    def recall(self, key: object, compute: Callable[[], Any]) -> Any:
        """The next kept result; computed again if the block has changed it in place since.

        Raises:
            RuntimeError: the block runs differently than in forward.
        """
        index, self._next = self._next, self._next + 1
        entry = self._kept[index] if index < len(self._kept) else None
        if entry is None or entry[0] is not key:
            raise RuntimeError(
                f"a selectively checkpointed block came to {key} in backward, where forward did not; "
                "use activation_checkpointing=full or none for a module that runs differently each time"
            )
        if not self.runs_again:
            self._kept[index] = None
        _, stored_result, versions = entry
        tensors = [leaf for leaf in tree_leaves(stored_result) if isinstance(leaf, Tensor)]
        if [tensor._version for tensor in tensors] != versions:
            return compute()
        return tree_map_only(Tensor, _detached, stored_result) if self.runs_again else stored_result

    def check_overwritten(self, tensors: list[Tensor]) -> None:
        """Refuse an in-place collective on a kept result: the recomputation would reduce it a second time."""
        if not self.in_collective and any(tensor.untyped_storage()._cdata in self._storages for tensor in tensors):
            raise RuntimeError(
                "a collective overwrites a result that a checkpointed block keeps; call it through keep_collective"
            )


_active: ContextVar[Region | None] = ContextVar("selective_region", default=None)


def keep_collective(compute: Callable[[], Tensor]) -> Tensor:
    """The result of `compute`, which communicates between ranks and calls no operator of `KEPT`.

    Inside a selectively checkpointed block the result is kept, so that every rank communicates only once, and not again in
    backward; elsewhere this is a plain call. `compute` may overwrite a kept operator's result: both that operator and this
    function then recall the communicated value.
    """
    region = _active.get()
    if region is None:
        return compute()
    if not region.in_forward:
        recalled: Tensor = region.recall(keep_collective, compute)
        return recalled
    region.in_collective = True
    try:
        result = compute()
    finally:
        region.in_collective = False
    region.keep(keep_collective, result)
    return result


def selective_contexts(runs_again: bool) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The contexts of one call of a block, for forward and recomputation, for `torch.utils.checkpoint.checkpoint`.

    torch's `create_selective_checkpoint_contexts` returns a kept result only once, so that zero-bubble schedules, whose
    backward has several parts, fail; and it does not handle collectives that overwrite kept results.
    """
    region = Region(runs_again)
    return _Keeping(region), _Recalling(region)


class _RegionMode(TorchDispatchMode):
    """Intercepts every operator below autograd, and makes the region active."""

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
    """Forward: run all operators, keep the results of `KEPT`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OVERWRITING:
            self.region.check_overwritten(args[0])
        result = func(*args, **(kwargs or {}))
        if func in KEPT:
            self.region.keep(func, result)
        return result


class _Recalling(_RegionMode):  # type: ignore[no-untyped-call]
    """Backward: run all operators again except `KEPT`."""

    def __enter__(self) -> Any:
        self.region.in_forward = False
        self.region.rewind()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compute = functools.partial(func, *args, **(kwargs or {}))
        return self.region.recall(func, compute) if func in KEPT else compute()


def _detached(value: Tensor) -> Tensor:
    """A tensor with the same memory and version counter, but without the graph, which the original would keep alive."""
    # Below autograd an alias has a separate version counter unless this dispatch key is included.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def checkpoint_blocks(blocks: Sequence[nn.Module], config: TrialConfig, stage: int = 0, draws: bool = True) -> None:
    """Recompute blocks of a stage in backward instead of keeping their activations, according to `activation_checkpointing` or
    the stage's mark in `pipeline_layout`.

    `full` keeps only a block's input; `selective` also keeps the results of expensive operators and of collectives (`KEPT`,
    `keep_collective`), and recomputes norms, activations, rotations and other cheap ones. Of every `checkpoint_every_k`
    consecutive blocks the first is checkpointed: backward reaches the last one first, when everything is still stored, so
    recomputing it would not reduce the peak. For the same reason the first blocks of a stage marked by the layout are chosen.

    A block's `forward` is replaced, instead of wrapping the block, so that hooks on the block (stage-3 gathers) stay outside
    the recomputed region: gathers inside it would be recorded and replayed as part of the block.

    `draws`: whether blocks may draw random numbers (dropout). If so, the generators' states are read from the device before
    each block and restored in backward, so that the same numbers are drawn.
    """
    kind, chosen = recomputed_layers(config, stage, len(blocks))
    # Zero-bubble schedules call backward separately for a block's input and its weights: each recomputes the block.
    parts = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    for block in (blocks[index] for index in chosen):
        block.forward = CheckpointedForward(block.forward, draws, kind == "selective", parts)


class CheckpointedForward:
    """A block's forward that backward runs again, uncompiled or inside a compiled function."""

    def __init__(self, forward: Callable[..., Any], draws: bool, selective: bool, runs_again: bool) -> None:
        """`runs_again`: whether several parts of backward each recompute the block."""
        self.forward, self.draws, self.selective = forward, draws, selective
        self._contexts = functools.partial(selective_contexts, runs_again)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        contexts = _COMPILED_CONTEXTS if torch.compiler.is_compiling() else self._contexts
        keywords |= {"context_fn": contexts} if self.selective else {}
        return checkpoint(self.forward, *inputs, use_reentrant=False, preserve_rng_state=self.draws, **keywords)

    def around(self, forward: Callable[..., Any]) -> "CheckpointedForward":
        """The same of another function."""
        other = copy(self)
        other.forward = forward
        return other


def _policy(_context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    keeps = function in KEPT or getattr(function, "namespace", "") == NAMESPACE
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


_COMPILED_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, _policy)
"""The contexts with which the compiler marks what to keep."""
