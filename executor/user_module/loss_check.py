"""Finds what the loss of a user's module depends on, by running the plain module on a few samples in different ways."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from executor.batches import FactoryData, seed_generators, tensors_of
from executor.user_module.survey import LARGEST_RUN, loss_of
from search_spaces.models.loss_trait import LossTrait

SAMPLES = 4
"""Samples of the batch that is divided."""
MOST_SECONDS = 3.0
"""Longest forward of such a batch for which the others are run: nine as long."""
IGNORED = -100
"""Label of a token without a target."""


def loss_traits(module: nn.Module, data: FactoryData) -> tuple[LossTrait, ...]:
    """Run the module on the whole of a batch, on its parts, and again with other seeds. Its buffers may change.

    1. The same seeds twice: if losses differ, nothing can be compared.
    2. Other seeds: if losses differ, it draws random numbers in forward.
    3. Halves and single samples: if the mean over parts is not the loss of the whole, the loss depends on the division. Its
       cause is a sum if the parts add up to the whole, padding if there are labels of -100, else that samples are computed
       together.
    4. In training mode: whether other seeds change the loss (dropout), and whether buffers change.
    """
    if sum(parameter.numel() for parameter in module.parameters()) > LARGEST_RUN:
        return (LossTrait.UNCHECKED,)
    try:
        return tuple(_LossRuns(module, data).traits())
    except Exception:
        # Some modules run only on an accelerator. The first trial reports errors of a module.
        return (LossTrait.UNCHECKED,)


class _UndividedBatchError(Exception):
    """An entry of the batch does not have the samples as first dimension."""


class _LossRuns:
    """Forwards of one module."""

    def __init__(self, module: nn.Module, data: FactoryData) -> None:
        self.module, self.data = module, data
        self.training = [inner for inner in module.modules() if inner.training]
        dtype = next(parameter.dtype for parameter in module.parameters() if parameter.requires_grad)
        self.tolerance = 1e3 * torch.finfo(dtype).eps if dtype in (torch.float32, torch.float64) else 1e-2

    def traits(self) -> Iterator[LossTrait]:
        whole = self.data.micro_batch(0, 0, SAMPLES)
        self.module.eval()
        state = [*self.module.parameters(), *self.module.buffers()]
        versions = [value._version for value in state]
        began = time.perf_counter()
        try:
            trains_only = self._loss(whole) is None
        except Exception:
            trains_only = True  # its predictions may need other arguments, or operators that are not there
        if trains_only:
            self._train()
            if self._loss(whole) is None:
                yield LossTrait.UNCHECKED
                return
            yield LossTrait.TRAINS_ONLY
        elif versions != [value._version for value in state]:
            yield LossTrait.STATE
        if time.perf_counter() - began > MOST_SECONDS:
            yield LossTrait.UNCHECKED
            return
        if self._differs(self._loss(whole), self._loss(self.data.micro_batch(0, 0, SAMPLES))):
            yield LossTrait.IRREPRODUCIBLE
            return
        is_random = self._differs(self._loss(whole), self._loss(whole, seed=1))
        if is_random:
            yield LossTrait.DROPOUT if trains_only else LossTrait.RANDOM
        else:
            yield from self._of_divisions(whole)
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        self._train()
        if self._differs(self._loss(whole), self._loss(whole, seed=1)) and not is_random:
            yield LossTrait.DROPOUT
        if not all(torch.equal(*pair) for pair in zip(buffers, self.module.buffers(), strict=True)):
            yield LossTrait.BUFFERS

    def _of_divisions(self, whole: Mapping[str, Any]) -> Iterator[LossTrait]:
        fewer = self.data.micro_batch(0, 0, SAMPLES - 1)
        loss = self._loss(whole)
        for size in (SAMPLES // 2, 1):
            firsts = range(0, SAMPLES, size)
            try:
                parts = [self._loss(_part(whole, fewer, first, size)) for first in firsts]
            except _UndividedBatchError:
                yield LossTrait.UNDIVIDED
                return
            total = math.fsum(part for part in parts if part is not None)
            if not self._differs(loss, total / len(parts)):
                continue
            padded = any(not value.is_floating_point() and bool((value == IGNORED).any()) for value in tensors_of(whole))
            is_sum = not self._differs(loss, total)
            yield LossTrait.SUM if is_sum else LossTrait.PADDED if padded else LossTrait.TOGETHER
            return

    @torch.no_grad()
    def _loss(self, batch: Mapping[str, Any], seed: int = 0) -> float | None:
        seed_generators(seed)
        loss = loss_of(self.module(**batch))
        return None if loss is None else float(loss)

    def _train(self) -> None:
        for inner in self.training:
            inner.training = True

    def _differs(self, first: float | None, second: float | None) -> bool:
        return first is not None and second is not None and not math.isclose(first, second, rel_tol=self.tolerance)


def _part(whole: Any, fewer: Any, first: int, size: int) -> Any:
    """The `size` samples from `first` on of a batch of SAMPLES; `fewer`: a batch of one sample less, whose entries show which
    dimension is the samples.

    Raises:
        _UndividedBatchError: it is not the samples.
    """
    if isinstance(whole, Mapping):
        return {name: _part(value, fewer[name], first, size) for name, value in whole.items()}
    if isinstance(whole, Tensor) and (not whole.dim() or whole.shape == fewer.shape):
        return whole
    if isinstance(whole, Tensor | list | tuple) and (len(whole), len(fewer)) == (SAMPLES, SAMPLES - 1):
        return whole[first : first + size]
    if type(whole) in (list, tuple) and len(whole) == len(fewer):
        return type(whole)(_part(value, other, first, size) for value, other in zip(whole, fewer, strict=True))
    if whole is None or isinstance(whole, str | int | float):
        return whole
    raise _UndividedBatchError
