"""Rows of tokens at their experts: grouped products of many experts at once, and the all-to-all between the ranks that divide
the experts, waited for or overlapped with the shared expert.

With `shared_expert_overlap` the first half of the shared expert (its products up to the activation) runs while tokens travel to
their experts, and the second half (its last product) while results travel back, as in Megatron-LM's
`--moe-shared-expert-overlap` [DeepSeek-AI 2024, DeepSeek-V3, 3.2.1]:

| pass | all-to-all | overlaps with |
|---|---|---|
| forward | tokens to experts | the shared expert up to its activation |
| forward | results back | the last product of the shared expert |
| backward | gradients of the results | the backward of the last product |
| backward | gradients of the tokens | the backward of the rest |

In backward this follows from the order of forward: autograd runs the ready node that was created last, so between the node that
starts an exchange of gradients and the node that waits for it are those that forward created between the two.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from executor.parallel.checkpointing import keep_collective
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.tensor import ColumnLinear, RowLinear


class Exchange:
    """An all-to-all of rows and, in backward, that of their gradients the other way."""

    def __init__(self, group: ProcessGroup, sent: Sequence[int], received: Sequence[int], returns: bool) -> None:
        """`sent`, `received`: rows for and from each rank. `returns`: whether rows come back to the rank that owns them."""
        self.group, self.sent, self.received, self.returns = group, sent, received, returns
        self._in_flight: tuple[InFlight, Tensor] | None = None
        """What is waited for, and what is being sent, which must live until then."""
        self.due: Tensor | None = None
        """Rows that may still travel, between `start_exchange` and `finish_exchange`."""

    def start(self, x: Tensor, backward: bool = False) -> Tensor:
        """Send rows, or in `backward` gradients of received rows; the result may be read after `wait`."""
        sent, received = (self.received, self.sent) if backward else (self.sent, self.received)
        x, result = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        self._in_flight = self.group.all_to_all(result, x, received, sent, self.returns != backward), x
        return result

    def wait(self) -> None:
        """Wait for the last `start`; returns at once if its result was kept by selective checkpointing instead."""
        if self._in_flight is not None:
            self._in_flight[0].wait()
            self._in_flight = None

    def run(self, x: Tensor, backward: bool = False) -> Tensor:
        """`start`, and wait."""
        result = self.start(x, backward)
        self.wait()
        return result


def exchange(x: Tensor, by: Exchange) -> Tensor:
    """The rows that this rank receives."""
    if by.group.size == 1:
        return x
    result: Tensor = _Waited.apply(x, by)  # type: ignore[no-untyped-call]
    return result


def start_exchange(x: Tensor, by: Exchange) -> Tensor:
    """Send the rows. The result has no data; it represents them in the graph until `finish_exchange`."""
    result: Tensor = _Started.apply(x, by)  # type: ignore[no-untyped-call]
    return result


def finish_exchange(started: Tensor, by: Exchange) -> Tensor:
    """The rows that this rank receives, which have arrived."""
    result: Tensor = _Finished.apply(started, by)  # type: ignore[no-untyped-call]
    return result


class Halves(Protocol):
    """An MLP that can be computed in two halves."""

    def __call__(self, x: Tensor) -> Tensor:
        """`narrow` of `widen`."""
        ...

    def widen(self, x: Tensor) -> Tensor:
        """The hidden layer after its activation."""
        ...

    def narrow(self, hidden: Tensor) -> Tensor:
        """The result, from that layer."""
        ...


class SharedWork:
    """The shared expert on the tokens of a micro-batch, computed at once or in two steps."""

    def __init__(self, expert: Halves | None, x: Tensor) -> None:
        """`expert`: None: the layer has none."""
        self._expert, self._x = expert, x
        self._hidden: Tensor | None = None
        self._result: Tensor | None = None

    def step(self) -> None:
        """Compute the first half, then the second."""
        assert self._expert is not None  # only layers with shared experts overlap
        if self._hidden is None:
            self._hidden = self._expert.widen(self._x)
        else:
            self._result, self._hidden = self._expert.narrow(self._hidden), None

    def added_to(self, mixed: Tensor) -> Tensor:
        """`mixed` plus the result, which is computed now if no step was."""
        if self._expert is None:
            return mixed
        return mixed + (self._expert(self._x) if self._result is None else self._result)


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Exchange) -> Tensor:
        ctx.by = by
        return keep_collective(lambda: by.run(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.by.run(gradients[0], backward=True), None


class _Started(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Exchange) -> Tensor:
        ctx.by = by
        # What is kept arrives before anything reads it: its memory is already that of the result.
        by.due = keep_collective(lambda: by.start(x))
        # Of the shape of what is sent, as its gradient is; that of the result may differ.
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.by.wait()
        return gradients[0], None


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _started: Tensor, by: Exchange) -> Tensor:
        ctx.by = by
        by.wait()
        due, by.due = by.due, None
        assert due is not None  # `start_exchange` has set it
        return due

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.by.start(gradients[0], backward=True), None


Multiply = Callable[[str, Tensor], Tensor]
"""(name of a matrix, rows) -> the rows times the matrices of this name of their experts."""
ALIGNED = 8
"""bf16 elements in 16 bytes; torch's kernel needs row sizes that are multiples of it."""


def can_group(experts: Sequence[nn.Module], rows: Tensor) -> bool:
    """Whether the products of `rows` can be grouped: plain ones in bf16, which torch's kernel supports on every device.

    Not if experts or their matrices have hooks, as with profiles and DeepSpeed's stage 3, since grouping does not call these.
    """
    if rows.dtype != torch.bfloat16 or len(experts) == 1:
        return False
    return all(_is_plain(module) for expert in experts for module in expert.modules())


def apply_grouped(experts: Sequence[nn.Module], rows: Tensor, counts: Tensor) -> Tensor:
    """Apply experts to rows [n, hidden] sorted by expert; `counts` [experts], the rows of each, stay on the device."""
    ends = counts.cumsum(0, dtype=torch.int32)

    def multiply(name: str, x: Tensor) -> Tensor:
        matrices = [expert.get_submodule(name) for expert in experts]
        weights = [_weight(matrix) for matrix in matrices]
        product: Tensor = _Grouped.apply(x, ends, *weights)  # type: ignore[no-untyped-call]
        biases = [matrix.bias for matrix in matrices if isinstance(matrix.bias, Tensor)]
        if not biases:
            return product
        parts = matrices[0].tensor.size if isinstance(matrices[0], RowLinear) else 1
        expert_of_row = torch.bucketize(torch.arange(len(x), device=x.device, dtype=ends.dtype), ends, right=True)
        return product + torch.stack(biases).index_select(0, expert_of_row) / parts

    result: Tensor = experts[0](rows, multiply)
    return result


class _Grouped(torch.autograd.Function):
    """Rows `x` [n, inputs] times the transpose of their weight out of `weights`, each [outputs, inputs]: [n, outputs].

    `ends` [weights], int32: the end of the rows of each weight. `x` and the weights are saved for backward. The weights are
    stacked anew for each product, unless they already lie at equal distances in one storage.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return torch._grouped_mm(x, stack_weights(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x, _, *of_weights = ctx.needs_input_grad
        to_x = torch._grouped_mm(gradient, stack_weights(weights), offs=ends) if of_x else None
        if not any(of_weights):
            return to_x, None, *(None for _ in weights)
        return to_x, None, *torch._grouped_mm(gradient.T, x, offs=ends).unbind()


def stack_weights(weights: Sequence[Tensor]) -> Tensor:
    """Matrices of equal shape as [matrices, outputs, inputs]: a view if they lie at equal distances in one storage, else a
    copy."""
    first = weights[0]
    if torch.compiler.is_compiling() or not all(weight.is_contiguous() for weight in weights):
        return torch.stack(tuple(weights))
    storages = {weight.untyped_storage()._cdata for weight in weights}
    offsets = [weight.storage_offset() for weight in weights]
    distance = offsets[1] - offsets[0]
    equal = all(after - before == distance for before, after in itertools.pairwise(offsets))
    if len(storages) > 1 or not equal or distance < first.numel() or distance % ALIGNED:
        return torch.stack(tuple(weights))
    return first.detach().as_strided((len(weights), *first.shape), (distance, *first.stride()))


def _is_plain(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if not isinstance(module, ColumnLinear | RowLinear):
        return True
    plain = module.adapter is None and module.quantised is None and not module.float8
    return plain and not (module.in_features % ALIGNED or module.out_features % ALIGNED)


def _weight(matrix: nn.Module) -> Tensor:
    assert isinstance(matrix, ColumnLinear | RowLinear)
    return matrix.weight
