"""Recomputation by module (`recompute_modules`): results of cheap modules are not kept for backward, but computed again from
their inputs, while the rest of a block keeps its tensors.

As Megatron-LM's `--recompute-granularity selective --recompute-modules`, whose `CheckpointWithoutOutput` also drops the result
of a module that the next product has saved.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from executor.parallel.checkpointing import CheckpointedForward
from search_spaces.knobs.computation import modules_in


class RecomputedBlock:
    """The forward of a block of which some calls (`recomputed`) are run again in backward.

    1. A call keeps its inputs. Tensors that autograd saves during it are not kept, only counted; nor are its results, where the
       block's other operations save them.
    2. The first use of any of them in backward runs the call again, with gradients, so that it saves the same tensors in the
       same order. Each is dropped after its last use; a second backward through the block runs the call again.
    3. An input that is the result of another such call is not kept either.

    The call must compute the same each time, must not communicate, and nothing may change its results in place. The values are
    bitwise those of a block that keeps everything.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._forward = block, block.forward
        self._constants: frozenset[int] = frozenset()
        """Storages of the block's parameters and buffers."""
        self._results: dict[int, tuple[_Call, int, Tensor, int]] = {}
        """Storage -> the call that made it, the index of the result, the result and its version; while forward runs."""
        self._active = False

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*inputs, **keywords)
        self._active = True
        self._constants = frozenset(storage_of(value) for value in (*self._block.parameters(), *self._block.buffers()))
        try:
            with saved_tensors_hooks(self.keep, read):
                return self._forward(*inputs, **keywords)
        finally:
            self._active = False
            self._results.clear()

    def recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of tensors, run again in backward when a call of the block calls it."""

        def call(*inputs: Any) -> Any:
            if not self._active:
                return function(*inputs)
            made = _Call(function, inputs, self.keep, self._constants)
            results = made.run()
            leaves = [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, Tensor)]
            for index, leaf in enumerate(leaves):
                self._results[storage_of(leaf)] = made, index, leaf.detach(), leaf._version
            return results

        return call

    def keep(self, value: Tensor) -> "Tensor | _Dropped":
        """What stands for a tensor that is to be kept: a result of a call can be computed again."""
        entry = self._results.get(storage_of(value))
        if entry is None or value._version != entry[3]:
            return value
        return entry[0].dropped(entry[1], value)


class _Dropped(NamedTuple):
    """A tensor that can be computed again: a view of a result of a call, or of a tensor that the call saves."""

    call: "_Call"
    is_result: bool
    position: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Call:
    """One call: its inputs, and the tensors that backward reads of it."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        keep: "Callable[[Tensor], Tensor | _Dropped]",
        constants: frozenset[int],
    ) -> None:
        self._function, self._keep, self._constants = function, keep, constants
        leaves, self._structure = tree_flatten(tuple(inputs))
        self._inputs: list[Any] | None = leaves
        self._kept = [(keep(leaf), leaf.requires_grad) if isinstance(leaf, Tensor) else (leaf, None) for leaf in leaves]
        self._own = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        self._saved = 0
        self._uses: dict[tuple[bool, int], int] = {}
        self._left: dict[tuple[bool, int], int] = {}
        self._values: dict[tuple[bool, int], Tensor] = {}

    def run(self) -> Any:
        """The results, for the first time."""
        leaves, self._inputs = self._inputs, None
        assert leaves is not None
        with saved_tensors_hooks(self._count, read):
            return self._function(*tree_unflatten(leaves, self._structure))

    def dropped(self, index: int, value: Tensor, is_result: bool = True) -> _Dropped:
        """Stands for a view of a result, or of what the call saves."""
        key = is_result, index
        self._uses[key] = self._uses.get(key, 0) + 1
        return _Dropped(self, is_result, index, value.shape, value.stride(), int(value.storage_offset()))

    def value(self, key: tuple[bool, int]) -> Tensor:
        """The tensor, computed again if it is not there; dropped after its last use."""
        if not self._left.get(key):
            self._compute()
        self._left[key] -= 1
        return self._values[key] if self._left[key] else self._values.pop(key)

    def _count(self, value: Tensor) -> "Tensor | _Dropped":
        storage = storage_of(value)
        if storage in self._constants:
            return value
        if storage in self._own:
            return self._keep(value)
        self._saved += 1
        return self.dropped(self._saved - 1, value, is_result=False)

    def _compute(self) -> None:
        leaves = [
            read(kept).detach().requires_grad_(requires) if requires is not None else kept for kept, requires in self._kept
        ]
        inputs = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        saved: list[Tensor] = []

        def collect(value: Tensor) -> None:
            if storage_of(value) not in self._constants | inputs:
                saved.append(value.detach())

        with torch.enable_grad(), saved_tensors_hooks(collect, _refuse):
            results = self._function(*tree_unflatten(leaves, self._structure))
        made = [leaf.detach() for leaf in tree_flatten(results)[0] if isinstance(leaf, Tensor)]
        if len(saved) != self._saved:
            raise RuntimeError("a recomputed module runs differently in backward; set recompute_modules to none of its kind")
        values = {(True, index): value for index, value in enumerate(made)}
        values |= {(False, index): value for index, value in enumerate(saved)}
        self._values = {key: values[key] for key in self._uses}
        self._left = dict(self._uses)


def read(kept: Any) -> Any:
    """The tensor for which `kept` stands."""
    if not isinstance(kept, _Dropped):
        return kept
    return kept.call.value((kept.is_result, kept.position)).as_strided(kept.shape, kept.stride, kept.offset)


def _refuse(_: Any) -> Any:
    raise RuntimeError("the graph of a recomputed module is not run backward")


def storage_of(value: Tensor) -> int:
    """A key that identifies a storage, even one without data."""
    key: int = value.untyped_storage()._cdata
    return key


def recompute_modules(blocks: Sequence[nn.Module], text: str) -> None:
    """Run the named parts of blocks of our own model again in backward, by `recompute_modules`.

    A block's and its parts' methods are replaced, instead of wrapping modules, so that hooks on them stay outside.
    """
    names = modules_in(text)
    for block in blocks if names else ():
        if isinstance(block.forward, CheckpointedForward):
            continue  # it keeps nothing but its input
        recomputed = RecomputedBlock(block)
        block.forward = recomputed
        for module in block.modules():
            for attribute, name in getattr(module, "recomputable", {}).items():
                if name in names:
                    part = getattr(module, attribute)
                    if isinstance(part, nn.Module):
                        part.forward = recomputed.recomputed(part.forward)
                    elif part is not None:
                        setattr(module, attribute, recomputed.recomputed(part))
