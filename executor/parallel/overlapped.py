"""Tensor-parallel products whose communication runs beside them (`async_tensor_parallel`).

| product | pass | what travels | beside |
|---|---|---|---|
| rows | forward | the sum of one part of the tokens after another | the product of the next part |
| columns | backward | the sum of the input's gradients | the gradients of the weights |

As Megatron-LM's `--tp-comm-overlap`, and its asynchronous all-reduce of input gradients [Shoeybi et al. 2019; Wang et al. 2023,
Overlap Communication with Dependent Computation via Decomposition]. Gathers of sequence parallelism stay as they are: what
follows needs all that they bring.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor.parallel.collectives import Group
from executor.parallel.exchanges import gather_tokens, shares_of_tokens
from executor.parallel.selective import keep_collective
from search_spaces.overlap import ROW_PARTS


def multiply_columns(
    x: Tensor, weights: Sequence[Tensor], group: Group, sequence_parallel: bool
) -> tuple[Tensor, list[Tensor]]:
    """`x` as it enters, for further consumers, and its product with each rank's slices [outputs, inputs]."""
    entered, *products = _Columns.apply(x, group, sequence_parallel, *weights)  # type: ignore[no-untyped-call]
    return entered, products


def multiply_rows(x: Tensor, weight: Tensor, beside: Tensor | None, group: Group, sequence_parallel: bool) -> Tensor:
    """The sum over the ranks of `x` times the slice [outputs, inputs], and of `beside` where there is such a summand.

    With `sequence_parallel` a rank gets its share of the tokens.
    """
    due = _RowInputs.apply(x, weight)  # type: ignore[no-untyped-call]
    result: Tensor = _RowSum.apply(due, x.detach(), weight.detach(), beside, group, sequence_parallel)  # type: ignore[no-untyped-call]
    return result


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sequence_parallel: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.set_materialize_grads(False)
        entered = keep_collective(lambda: gather_tokens(x, group)) if sequence_parallel else x.view_as(x)
        ctx.save_for_backward(entered if sequence_parallel else x, *weights)
        return entered, *(functional.linear(entered, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the input first; while their sum is on its way, those of the weights, each one product."""
        entered, *weights = ctx.saved_tensors
        whole, *parts = gradients
        used = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part is not None]
        summand = _input_gradient(whole, used).view_as(entered) if ctx.needs_input_grad[0] else None
        sending = None if summand is None else _Sending(summand, ctx.group, ctx.sequence_parallel)
        needed = zip(parts, ctx.needs_input_grad[3:], strict=True)
        of_weights = [_weight_gradient(part, entered) if part is not None and asked else None for part, asked in needed]
        return None if sending is None else sending.result(), None, None, *of_weights


class _RowInputs(torch.autograd.Function):
    """Keeps what backward of a row product needs, before ranks exchange anything.

    Its result holds no numbers: it stands for the product in the graph. What is kept here and not where the product is made, a
    block that runs again in backward has before it comes to the exchange, and ends there.
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
        ctx: Any, _due: Tensor, x: Tensor, weight: Tensor, beside: Tensor | None, group: Group, sequence_parallel: bool
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        compute = _scattered if sequence_parallel else _summed
        return keep_collective(lambda: compute(x, weight, beside, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole = gather_tokens(gradients[0], ctx.group) if ctx.sequence_parallel else gradients[0]
        return whole, None, None, whole if ctx.needs_input_grad[3] else None, None, None


class _Sending:
    """The sum over the ranks of a gradient [batch, tokens, …], on its way; with `scatters` a rank's share of the tokens."""

    def __init__(self, summand: Tensor, group: Group, scatters: bool) -> None:
        if scatters:
            self._sent = shares_of_tokens(summand, group.size)
            self._result = summand.new_empty(self._sent.shape[1:])
            self._way = group.reduce_scatter(self._result.view(-1), self._sent.view(group.size, -1))
        else:
            self._result = summand
            self._way = group.all_reduce(summand)

    def result(self) -> Tensor:
        self._way.wait()
        return self._result


def _summed(x: Tensor, weight: Tensor, beside: Tensor | None, group: Group) -> Tensor:
    rows, total = _rows(x), x.new_empty(*x.shape[:-1], weight.shape[0])
    sums, ways = _rows(total), []
    for first, end in _parts(len(rows)):
        _multiply(rows[first:end], weight, None if beside is None else _rows(beside)[first:end], sums[first:end])
        ways.append(group.all_reduce(sums[first:end]))
    for way in ways:
        way.wait()
    return total


def _scattered(x: Tensor, weight: Tensor, beside: Tensor | None, group: Group) -> Tensor:
    """A part has as many tokens of each rank's share, so that what a rank gets of it is a part of its own tokens."""
    shares = shares_of_tokens(x, group.size)
    others = None if beside is None else shares_of_tokens(beside, group.size).flatten(1, 2)
    own = x.new_empty(*shares.shape[1:-1], weight.shape[0])
    sums, rows, ways = _rows(own), shares.flatten(1, 2), []
    for first, end in _parts(len(sums)):
        summand = x.new_empty(group.size * (end - first), weight.shape[0])
        _multiply(_rows(rows[:, first:end]), weight, None if others is None else _rows(others[:, first:end]), summand)
        # Held until it has been sent.
        ways.append((group.reduce_scatter(sums[first:end].view(-1), summand.view(group.size, -1)), summand))
    for way, _ in ways:
        way.wait()
    return own


def _parts(rows: int) -> Iterator[tuple[int, int]]:
    """First and end of `ROW_PARTS` parts, or of as many as there are rows."""
    parts = min(ROW_PARTS, rows)
    yield from ((rows * part // parts, rows * (part + 1) // parts) for part in range(parts))


def _multiply(rows: Tensor, weight: Tensor, beside: Tensor | None, result: Tensor) -> None:
    # With `out` these are no operators that selective checkpointing keeps: it keeps the sum of all parts.
    if beside is None:
        torch.mm(rows, weight.T, out=result)
    else:
        torch.addmm(beside, rows, weight.T, out=result)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _input_gradient(beside: Tensor | None, used: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    total = None if beside is None else _rows(beside)
    for gradient, weight in used:
        rows = _rows(gradient)
        total = rows @ weight if total is None else torch.addmm(total, rows, weight)
    assert total is not None  # autograd asks for no gradient of what nobody has used
    return total.contiguous()


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return _rows(gradient).T @ _rows(x)
