"""Describes a user's module for the search, before the first trial: its parameters, its FLOPs and what its loss depends on."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from executor.batches import NO_TARGET, FactoryData, map_tensors, seed_generators, tensors_of
from executor.errors import FactoryError
from executor.measurement.flop_counter import FlopCounter
from executor.user_module.calls import called_blocks
from executor.user_module.factory import LEAST_SAMPLES, load_factory
from executor.user_module.plan import UserModule, tensor_divisor
from executor.user_module.survey import (
    LARGEST_RUN,
    NO_LOSS,
    Survey,
    UndividedError,
    copies_to_run,
    loss_of,
    parameter_count,
    survey,
)
from search_spaces.models.model import FactoryModel
from search_spaces.models.module_profile import LossTrait
from search_spaces.trial import Workload

PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Dtype of parameters -> precision."""


def describe(reference: str, workload: Workload) -> FactoryModel:
    """Build `module:factory`, count its parameters and find where it can be divided.

    Raises:
        FactoryError: the factory or its batch function violates the Protocol, or raises.
    """
    user = load_factory(reference, workload)
    data = FactoryData(batch=user.batch, seed=workload.seed)
    batch = data.micro_batch(0, 0, LEAST_SAMPLES)
    _require_sizes(reference, data)
    # First, as a run without data may leave its tensors in what the module shares.
    traits = loss_traits(user.module, data, reference)
    return replace(
        described(user, batch)[0],
        flops_per_sample=flops_per_sample(user.module, batch),
        refused_knobs=called_blocks(user, batch).refused_knobs,
        loss_traits=traits,
    )


def _require_sizes(reference: str, data: FactoryData) -> None:
    """Refuse a batch function that makes as many samples whatever it is asked for: rates would count others than it makes."""
    shapes: list[list[tuple[int, ...]]] = []
    with suppress(Exception):  # the first trial reports errors of a batch function
        for size in (SAMPLES, SAMPLES - 1):
            shapes.append([tuple(tensor.shape) for tensor in tensors_of(data.micro_batch(0, 0, size))])
    if len(shapes) == 2 and shapes[0] == shapes[1] and any(shapes[0]):
        problem = f"{reference}: batch({SAMPLES}, …) and batch({SAMPLES - 1}, …) have tensors of the same shapes"
        raise FactoryError(f"{problem}; make as many samples as micro_batch_size asks for, which rates count")


def described(user: UserModule, batch: Mapping[str, Any]) -> tuple[FactoryModel, Survey | None]:
    """The parameters of a module, which may have no memory, and where it can be divided; `batch`: of a few samples."""
    parameters = list(user.module.parameters())
    module_survey, why = _surveyed(user, batch)
    precision, other_types = _types(parameters)
    model = FactoryModel(
        reference=user.reference,
        parameter_count=parameter_count(user.module),
        frozen_parameter_count=sum(parameter.numel() for parameter in parameters if not parameter.requires_grad),
        tensor_divisor=tensor_divisor(user),
        pipeline_stages=1 if module_survey is None else len(module_survey.starts),
        no_stages=why,
        precision=precision,
        other_types=other_types,
    )
    return model, module_survey


def _types(parameters: list[nn.Parameter]) -> tuple[str, str]:
    """The precision of the trained parameters, empty if they have several; and the parameters of other types, in a clause."""
    elements = Counter[tuple[str, bool]]()
    for parameter in parameters:
        if parameter.dtype in PRECISIONS:
            elements[PRECISIONS[parameter.dtype], parameter.requires_grad] += parameter.numel()
    trained = {precision for precision, is_trained in elements if is_trained}
    precision = trained.pop() if len(trained) == 1 else ""
    return precision, ", ".join(
        f"{count:,} {'trained' if is_trained else 'frozen'} in {kind}"
        for (kind, is_trained), count in elements.items()
        if kind != precision
    )


def flops_per_sample(module: nn.Module, batch: Mapping[str, Any]) -> float | None:
    """FLOPs of a forward and backward per sample of `batch`; None if they cannot be counted here.

    The module runs on the meta device, where nothing is computed. If that fails and the module is small, it runs on the CPU.
    """
    for make_copies in copies_to_run(module, batch):
        with suppress(Exception):
            copied, inputs = make_copies()
            with FlopCounter() as counter:
                loss = loss_of(copied(**inputs))
                if loss is None:
                    return None
                loss.backward()  # type: ignore[no-untyped-call]
            return counter.total / LEAST_SAMPLES if counter.total else None
    return None


def _surveyed(user: UserModule, batch: Mapping[str, Any]) -> tuple[Survey | None, str]:
    """Where a pipeline can cut the module, or the reason why it cannot."""
    sizes = {len(value) if isinstance(value, Tensor) and value.dim() else 0 for value in batch.values()}
    if len(sizes) != 1 or 0 in sizes:
        return None, "the first dimension of the entries of its batch is not the samples"
    try:
        return survey(user.module, batch, user.plan), ""
    except UndividedError as error:
        return None, str(error)
    except Exception as error:
        # Some modules run only on an accelerator. The first trial reports errors of a module.
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"it does not run on the CPU ({type(error).__name__}: {first})"


SAMPLES = 4
"""Samples of the batch that is divided."""
MOST_SECONDS = 3.0
"""CPU time of the first forwards of such a batch up to which the others are run: nine of them."""


def loss_traits(module: nn.Module, data: FactoryData, reference: str = "") -> tuple[LossTrait, ...]:
    """Run the module on the whole of a batch, on its parts, and again with other seeds. Its buffers may change.

    1. The same seeds twice: if losses differ, nothing can be compared.
    2. Other seeds: if losses differ, it draws random numbers in forward.
    3. Halves and single samples: if the mean over parts is not the loss of the whole, the loss depends on the division. Its
       cause is a sum if the parts add up to the whole, padding if there are labels of -100, else that samples are computed
       together.
    4. In training mode: whether other seeds change the loss (dropout), and whether buffers change.

    Raises:
        FactoryError: there is no loss.
    """
    if parameter_count(module) > LARGEST_RUN:
        return (LossTrait.UNCHECKED,)
    try:
        return tuple(_LossRuns(module, data, reference).traits())
    except FactoryError:
        raise
    except Exception:
        # Some modules run only on an accelerator. The first trial reports errors of a module.
        return (LossTrait.UNCHECKED,)


class _UndividedBatchError(Exception):
    """An entry of the batch does not have the samples as first dimension."""


class _LossRuns:
    """Forwards of one module."""

    def __init__(self, module: nn.Module, data: FactoryData, reference: str) -> None:
        self.module, self.data, self.reference = module, data, reference
        self.training = [inner for inner in module.modules() if inner.training]
        # A frozen part may compute in a narrower type than the trained one.
        epsilons = [torch.finfo(parameter.dtype).eps for parameter in module.parameters() if parameter.is_floating_point()]
        self.tolerance = min(1e3 * max(epsilons), 1e-2)

    def traits(self) -> Iterator[LossTrait]:
        whole = self.data.micro_batch(0, 0, SAMPLES)
        self.module.eval()
        state = [*self.module.parameters(), *self.module.buffers()]
        versions = [value._version for value in state]
        began = time.process_time()
        try:
            trains_only = not self._trains_twice(whole)
        except Exception:
            # Its predictions may need other arguments or operators, or it keeps the graph of its first forward.
            trains_only = True
            self.module.zero_grad()
        if trains_only:
            self._train()
            if self._loss(whole) is None:
                raise FactoryError(f"{self.reference}: {NO_LOSS}")
            yield LossTrait.TRAINS_ONLY
        elif versions != [value._version for value in state]:
            yield LossTrait.STATE
        if time.process_time() - began > MOST_SECONDS:
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
            padded = any(not value.is_floating_point() and bool((value == NO_TARGET).any()) for value in tensors_of(whole))
            is_sum = not self._differs(loss, total)
            yield LossTrait.SUM if is_sum else LossTrait.PADDED if padded else LossTrait.TOGETHER
            return

    def _trains_twice(self, batch: Mapping[str, Any]) -> bool:
        """Whether two micro-batches in succession have a loss and gradients. Raises what the module raises."""
        seed_generators(0)
        for _ in range(2):
            loss = loss_of(self.module(**map_tensors(batch, torch.clone)))
            if loss is None:
                return False
            loss.backward()  # type: ignore[no-untyped-call]
        self.module.zero_grad()
        return True

    @torch.no_grad()
    def _loss(self, batch: Mapping[str, Any], seed: int = 0) -> float | None:
        seed_generators(seed)
        loss = loss_of(self.module(**map_tensors(batch, torch.clone)))  # a forward may change its input in place
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
    if dataclasses.is_dataclass(whole) and not isinstance(whole, type):
        parts = {item.name: getattr(whole, item.name) for item in dataclasses.fields(whole) if item.init}
        others = {name: getattr(fewer, name) for name in parts}
        return dataclasses.replace(whole, **_part(parts, others, first, size))
    if type(whole) in (list, tuple) and len(whole) == len(fewer):
        return type(whole)(_part(value, other, first, size) for value, other in zip(whole, fewer, strict=True))
    if whole is None or isinstance(whole, str | int | float):
        return whole
    raise _UndividedBatchError
