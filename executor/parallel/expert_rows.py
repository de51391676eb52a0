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

from executor.parallel.block_collectives import collective, in_compiled_blocks
from executor.parallel.checkpointing import keep_collective
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.tensor import ColumnLinear, RowLinear

Numbers = Sequence[int] | Tensor
"""Numbers of rows: of this rank for each expert, then of each rank for each of this rank's experts. In a compiled block, which
may not read them, int64 on the host."""


class Exchange:
    """An all-to-all of rows. `outward` they go to the ranks of their experts, where they are sorted by expert, else back."""

    def __init__(self, numbers: Numbers, outward: bool, group: ProcessGroup) -> None:
        numbers = numbers.tolist() if isinstance(numbers, Tensor) else numbers
        half = len(numbers) // 2
        self._experts_of_ranks = half // group.size
        self._received = numbers[half:]
        self._by_rank = [self._sums(numbers[:half]), self._sums(self._received)]
        self.outward, self._group = outward, group
        self._in_flight: tuple[InFlight, Tensor] | None = None
        """What is waited for, and what is being sent, which must live until then."""
        self.due: Tensor | None = None
        """Rows that may still travel, between `start_exchange` and `finish_exchange`."""

    def start(self, x: Tensor, outward: bool) -> Tensor:
        """Send rows; the result is for `finish`."""
        sent, received = self._by_rank if outward else self._by_rank[::-1]
        if not outward:
            by_expert = [self._received[first :: self._experts_of_ranks] for first in range(self._experts_of_ranks)]
            x = _transposed(x, [size for sizes in by_expert for size in sizes], self._experts_of_ranks)
        x, result = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        self._in_flight = self._group.all_to_all(result, x, received, sent, not outward), x
        return result

    def finish(self, result: Tensor, outward: bool) -> Tensor:
        """The rows that have arrived, after the last `start`; its result may also be one that selective checkpointing kept."""
        if self._in_flight is not None:
            self._in_flight[0].wait()
            self._in_flight = None
        return _transposed(result, self._received, self._group.size) if outward else result

    def _sums(self, numbers: Sequence[int]) -> list[int]:
        """The sum for each rank of numbers for each of its experts."""
        return [
            sum(numbers[first : first + self._experts_of_ranks]) for first in range(0, len(numbers), self._experts_of_ranks)
        ]


def _transposed(x: Tensor, sizes: Sequence[int], rows: int) -> Tensor:
    """Pieces of these `sizes`, a table with this number of rows, in the order of the transposed table."""
    columns = len(sizes) // rows
    if 1 in (rows, columns):
        return x
    pieces = torch.split(x, list(sizes))
    return torch.cat([piece for column in range(columns) for piece in pieces[column::columns]])


@collective("Tensor counts")
def exchange_counts(counts: Tensor, group: ProcessGroup) -> Tensor:
    """The numbers of each rank's rows for each of this rank's experts, of the numbers for all experts [experts]."""
    # A copy, so that a group that sends nothing (torch's `fake` backend) receives what it would send.
    result, sizes = counts.clone(), [len(counts) // group.size] * group.size
    group.all_to_all(result, counts, sizes, sizes).wait()
    return result


def _moved(x: Tensor, _numbers: Tensor, rows: int | None, *_: Any) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size() if rows is None else rows, *x.shape[1:])


@collective("Tensor x, Tensor numbers, SymInt? rows, bool outward", shape=_moved)
def _move_rows(x: Tensor, numbers: Numbers, _rows: int | None, outward: bool, group: ProcessGroup) -> Tensor:
    """The rows that this rank receives; `_rows`: their number, which the compiler may have to know; None: it does not."""
    by = Exchange(numbers, outward, group)
    return by.finish(by.start(x, outward), outward)


def exchange(x: Tensor, numbers: Numbers, rows: int | None, outward: bool, group: ProcessGroup) -> Tensor:
    """The rows that this rank receives, `rows` if that is known."""
    if group.size == 1:
        return x
    result: Tensor = _Waited.apply(x, numbers, rows, outward, group)  # type: ignore[no-untyped-call]
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
    def forward(ctx: Any, x: Tensor, numbers: Numbers, rows: int | None, outward: bool, group: ProcessGroup) -> Tensor:
        ctx.numbers, ctx.rows, ctx.outward, ctx.group = numbers, x.shape[0], outward, group
        result: Tensor = _move_rows(x, numbers, rows, outward, group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _move_rows(gradients[0], ctx.numbers, ctx.rows, not ctx.outward, ctx.group), None, None, None, None


class _Started(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Exchange) -> Tensor:
        ctx.by = by
        # What is kept arrives before anything reads it: its memory is already that of the result.
        by.due = keep_collective(lambda: by.start(x, by.outward))
        # Of the shape of what is sent, as its gradient is; that of the result may differ.
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.by.finish(gradients[0], not ctx.by.outward), None


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _started: Tensor, by: Exchange) -> Tensor:
        ctx.by = by
        due, by.due = by.due, None
        assert due is not None  # `start_exchange` has set it
        return by.finish(due, by.outward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.by.start(gradients[0], not ctx.by.outward), None


Multiply = Callable[[str, Tensor], Tensor]
"""(name of a matrix, rows) -> the rows times the matrices of this name of their experts."""
ALIGNED = 8
"""bf16 elements in 16 bytes; torch's kernel needs row sizes that are multiples of it."""


def can_group(experts: Sequence[nn.Module], rows: Tensor) -> bool:
    """Whether the products of `rows` can be grouped: plain ones in bf16, which torch's kernel supports on every device, and all
    plain ones of a compiled block, where one operator has many (`_multiply_grouped`).

    Not if experts or their matrices have hooks, as with profiles and DeepSpeed's stage 3, since grouping does not call these.
    """
    if not torch.compiler.is_compiling() and (rows.dtype != torch.bfloat16 or len(experts) == 1):
        return False
    return all(_is_plain(module) for expert in experts for module in expert.modules())


def apply_grouped(experts: Sequence[nn.Module], rows: Tensor, counts: Tensor) -> Tensor:
    """Apply experts to rows [n, hidden] sorted by expert; `counts` [experts], the rows of each, stay on the device for torch's
    kernel."""
    if rows.dtype != torch.bfloat16:
        counts = counts.cpu()  # once, for all products
    ends = counts.cumsum(0, dtype=torch.int32)

    def multiply(name: str, x: Tensor) -> Tensor:
        matrices = [expert.get_submodule(name) for expert in experts]
        weights = [_weight(matrix) for matrix in matrices]
        product: Tensor = _Grouped.apply(x, ends, *weights)  # type: ignore[no-untyped-call]
        biases = [matrix.bias for matrix in matrices if isinstance(matrix.bias, Tensor)]
        if not biases:
            return product
        parts = matrices[0].tensor.size if isinstance(matrices[0], RowLinear) else 1
        expert_of_row = torch.bucketize(torch.arange(len(x), device=x.device, dtype=ends.dtype), ends.to(x.device), right=True)
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
        result: Tensor = _multiply_grouped(x, ends, list(weights), True)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x, _, *of_weights = ctx.needs_input_grad
        to_x = _multiply_grouped(gradient, ends, weights, False) if of_x else None
        if not any(of_weights):
            return to_x, None, *(None for _ in weights)
        return to_x, None, *_multiply_rows(gradient, x, ends).unbind()


def _product(x: Tensor, _: Tensor, weights: Sequence[Tensor], transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0 if transposed else 1])


@in_compiled_blocks("Tensor x, Tensor ends, Tensor[] weights, bool transposed", shape=_product)
def _multiply_grouped(x: Tensor, ends: Tensor, weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """Rows `x` times their weights, or the `transposed` of these."""
    if _is_aligned(x, weights[0], weights[0].T):
        stacked = stack_weights(weights)
        return torch._grouped_mm(x, stacked.transpose(1, 2) if transposed else stacked, offs=ends)
    return torch.cat(
        [rows @ (weight.T if transposed else weight) for rows, weight in zip(_pieces(x, ends), weights, strict=True)]
    )


def _stacked(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), gradient.shape[1], x.shape[1])


@in_compiled_blocks("Tensor gradient, Tensor x, Tensor ends", shape=_stacked)
def _multiply_rows(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The gradients [weights, outputs, inputs]."""
    if _is_aligned(x, gradient):
        return torch._grouped_mm(gradient.T, x, offs=ends)
    return torch.stack([part.T @ rows for part, rows in zip(_pieces(gradient, ends), _pieces(x, ends), strict=True)])


def _pieces(x: Tensor, ends: Tensor) -> Sequence[Tensor]:
    return x.tensor_split(ends.tolist()[:-1])


def _is_aligned(*matrices: Tensor) -> bool:
    """Whether torch has a kernel for grouped products of these matrices."""
    return all(len(matrix) and matrix.dtype == torch.bfloat16 and not matrix.shape[1] % ALIGNED for matrix in matrices)


def stack_weights(weights: Sequence[Tensor]) -> Tensor:
    """Matrices of equal shape as [matrices, outputs, inputs]: a view if they lie at equal distances in one storage, else a
    copy."""
    first = weights[0]
    if not all(weight.is_contiguous() for weight in weights):
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
    if module.adapter is not None or module.quantised is not None or module.float8:
        return False
    return torch.compiler.is_compiling() or not (module.in_features % ALIGNED or module.out_features % ALIGNED)


def _weight(matrix: nn.Module) -> Tensor:
    assert isinstance(matrix, ColumnLinear | RowLinear)
    return matrix.weight
