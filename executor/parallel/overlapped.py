"""Tensor-parallel products that overlap with their communication (`async_tensor_parallel`).

| product | pass | communication | overlaps with |
|---|---|---|---|
| rows | forward | the sums of parts of the tokens, one after another | the product of the next part |
| columns | backward | the sum of the input's gradients | the gradients of the weights |

As Megatron-LM's `--tp-comm-overlap`, and its asynchronous all-reduce of input gradients [Shoeybi et al. 2019; Wang et al. 2023,
Overlap Communication with Dependent Computation via Decomposition]. Gathers of sequence parallelism do not overlap, because the
next operation needs their whole result.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor.parallel.block_collectives import collective, gather_tokens, shares_of_tokens
from executor.parallel.collectives import ProcessGroup
from search_spaces.communication import ROW_PARTS

ROW_PRODUCT = "Tensor x, Tensor weight, Tensor? addend"
"""Schema of the arguments of a row product."""


def multiply_columns(
    x: Tensor, weights: Sequence[Tensor], group: ProcessGroup, sequence_parallel: bool
) -> tuple[Tensor, list[Tensor]]:
    """The entered `x`, for further consumers, and its products with this rank's slices [outputs, inputs]."""
    entered, *products = _Columns.apply(x, group, sequence_parallel, *weights)  # type: ignore[no-untyped-call]
    return entered, products


def multiply_rows(x: Tensor, weight: Tensor, addend: Tensor | None, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """The sum over the ranks of `x` times the slice [outputs, inputs], plus the optional `addend`.

    With `sequence_parallel` a rank gets its share of the tokens.
    """
    due = _RowInputs.apply(x, weight)  # type: ignore[no-untyped-call]
    result: Tensor = _RowSum.apply(due, x.detach(), weight.detach(), addend, group, sequence_parallel)  # type: ignore[no-untyped-call]
    return result


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, sequence_parallel: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.set_materialize_grads(False)
        entered = gather_tokens(x, group) if sequence_parallel else x.view_as(x)
        ctx.save_for_backward(entered if sequence_parallel else x, *weights)
        return entered, *(functional.linear(entered, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        entered, *weights = ctx.saved_tensors
        whole, *parts = gradients
        of_input, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        used = [index for index, part in enumerate(parts) if part is not None]
        trained = [index for index in used if needed[index]]
        total, *of_trained = _column_gradients(
            whole, [parts[index] for index in used], [weights[index] for index in used], entered, of_input,
            [needed[index] for index in used], ctx.sequence_parallel, ctx.group,
        )  # fmt: skip
        of_weights = dict(zip(trained, of_trained, strict=True))
        return total if of_input else None, None, None, *(of_weights.get(index) for index in range(len(weights)))


class _RowInputs(torch.autograd.Function):
    """Saves the tensors for backward of a row product, before any communication.

    Its result has no data; it represents the product in the graph. Because the tensors are saved here and not with the product,
    a block that is recomputed in backward has them before it reaches the communication, and stops there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_input = (_rows(gradients[0]) @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return of_input, _weight_gradient(gradients[0], x) if ctx.needs_input_grad[1] else None


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _due: Tensor, x: Tensor, weight: Tensor, addend: Tensor | None, group: ProcessGroup, sequence_parallel: bool
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        compute = _scattered if sequence_parallel else _summed
        summed: Tensor = compute(x, weight, addend, group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole = gather_tokens(gradients[0], ctx.group) if ctx.sequence_parallel else gradients[0]
        return whole, None, None, whole if ctx.needs_input_grad[3] else None, None, None


@collective(
    "Tensor? whole, Tensor[] gradients, Tensor[] weights, Tensor entered, bool of_input, bool[] needed, bool scatters",
    "Tensor[]",
)
def _column_gradients(
    whole: Tensor | None, gradients: Sequence[Tensor], weights: Sequence[Tensor], entered: Tensor, of_input: bool,
    needed: Sequence[bool], scatters: bool, group: ProcessGroup,
) -> list[Tensor]:  # fmt: skip
    """The input's gradient (empty if not `of_input`) and, while it is being summed, those of the needed weights, each in one
    product."""
    total, work = entered.new_empty(0), None
    if of_input:
        total = _input_gradient(whole, list(zip(gradients, weights, strict=True))).view_as(entered)
        if scatters:
            parts = shares_of_tokens(total, group.size)
            total = parts.new_empty(parts.shape[1:])
            work = group.reduce_scatter(total.view(-1), parts.view(group.size, -1))
        else:
            work = group.all_reduce(total)
    of_weights = [_weight_gradient(part, entered) for part, trains in zip(gradients, needed, strict=True) if trains]
    if work is not None:
        work.wait()
    return [total, *of_weights]


@collective(ROW_PRODUCT)
def _summed(x: Tensor, weight: Tensor, addend: Tensor | None, group: ProcessGroup) -> Tensor:
    rows, total = _rows(x), x.new_empty(*x.shape[:-1], weight.shape[0])
    sums, works = _rows(total), []
    for first, end in _parts(len(rows)):
        _multiply(rows[first:end], weight, None if addend is None else _rows(addend)[first:end], sums[first:end])
        works.append(group.all_reduce(sums[first:end]))
    for work in works:
        work.wait()
    return total


@collective(ROW_PRODUCT)
def _scattered(x: Tensor, weight: Tensor, addend: Tensor | None, group: ProcessGroup) -> Tensor:
    """Each part has equally many tokens of each rank's share, so that a rank receives a part of its own tokens."""
    shares = shares_of_tokens(x, group.size)
    addend_shares = None if addend is None else shares_of_tokens(addend, group.size).flatten(1, 2)
    output = x.new_empty(*shares.shape[1:-1], weight.shape[0])
    sums, rows, works = _rows(output), shares.flatten(1, 2), []
    for first, end in _parts(len(sums)):
        summand = x.new_empty(group.size * (end - first), weight.shape[0])
        _multiply(
            _rows(rows[:, first:end]), weight, None if addend_shares is None else _rows(addend_shares[:, first:end]), summand
        )
        # The summand must live until it has been sent.
        works.append((group.reduce_scatter(sums[first:end].view(-1), summand.view(group.size, -1)), summand))
    for work, _ in works:
        work.wait()
    return output


def _parts(rows: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of `ROW_PARTS` parts, or of one per row if there are fewer rows."""
    parts = min(ROW_PARTS, rows)
    yield from ((rows * part // parts, rows * (part + 1) // parts) for part in range(parts))


def _multiply(rows: Tensor, weight: Tensor, addend: Tensor | None, result: Tensor) -> None:
    # Selective checkpointing does not save results written to `out`; it saves the sum of all parts.
    if addend is None:
        torch.mm(rows, weight.T, out=result)
    else:
        torch.addmm(addend, rows, weight.T, out=result)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _input_gradient(addend: Tensor | None, used: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    total = None if addend is None else _rows(addend)
    for gradient, weight in used:
        rows = _rows(gradient)
        total = rows @ weight if total is None else torch.addmm(total, rows, weight)
    assert total is not None  # autograd requests no gradient of an unused input
    return total.contiguous()


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return _rows(gradient).T @ _rows(x)
