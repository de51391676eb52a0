"""Collectives inside blocks. A block that torch.compile compiles is one graph, in which each of them is one operator.

The methods of `ProcessGroup` read and change the state of this process (counts, clocks, the work in flight), which would split
a graph. A function decorated by `collective` is an operator of torch that the compiler calls and does not look into, so that
what it sends is counted whenever it runs. Uncompiled blocks call the function itself, without the host time of an operator.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from executor.parallel.checkpointing import NAMESPACE, keep_collective
from executor.parallel.collectives import InFlight, ProcessGroup


class _Silent(ProcessGroup):
    """Sends nothing. With it a function gives the compiler the shape of its result."""

    def _send_nothing(self, *_: Any, **__: Any) -> InFlight:
        return InFlight(lambda: None)

    all_reduce = reduce_scatter = all_gather = all_to_all = _send_nothing


def in_compiled_blocks(tensors: str, shape: Callable[..., Any], result: str = "Tensor") -> Callable[[Any], Any]:
    """Decorate a function that compiled blocks call as one operator, with arguments of the schema `tensors`.

    Args:
        shape: a result of the same shape and dtype, from the same arguments.
        result: schema of the result, which consists of new tensors.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = torch.library.custom_op(
            f"{NAMESPACE}::{function.__name__}", function, mutates_args=(), schema=f"({tensors}) -> {result}"
        )
        operator.register_fake(shape)

        def call(*arguments: Any) -> Any:
            return operator(*arguments) if torch.compiler.is_compiling() else function(*arguments)

        return call

    return decorate


def collective(
    tensors: str = "Tensor x", result: str = "Tensor", overwrites: bool = False, shape: Callable[..., Any] | None = None
) -> Callable[[Any], Any]:
    """Decorate a function whose last argument is the group over which it communicates.

    In an uncompiled, selectively checkpointed block its result is kept (`keep_collective`).

    Args:
        tensors: schema of the other arguments.
        result: schema of the result, which consists of new tensors.
        overwrites: whether the result is in the memory of the first argument instead. An operator gets a copy.
        shape: as for `in_compiled_blocks`; None: the function itself finds it, with a group that sends nothing.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: ProcessGroup, first: Any, *arguments: Any) -> Any:
            return function(first.clone(memory_format=torch.contiguous_format) if overwrites else first, *arguments, group)

        def result_of_nothing(*arguments: Any) -> Any:
            group = ProcessGroup.by_name[arguments[-1]]
            return run(_Silent(None, group.size, group.rank), *arguments[:-1])

        operator = torch.library.custom_op(
            f"{NAMESPACE}::{function.__name__}",
            lambda *arguments: run(ProcessGroup.by_name[arguments[-1]], *arguments[:-1]),
            mutates_args=(),
            schema=f"({tensors}, str group) -> {result}",
        )
        operator.register_fake(shape or result_of_nothing)

        def call(*arguments: Any) -> Any:
            if torch.compiler.is_compiling():
                return operator(*arguments[:-1], arguments[-1].name)
            return keep_collective(lambda: function(*arguments))

        return call

    return decorate


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, forward: Callable[..., Tensor], adjoint: Callable[..., Tensor]
    ) -> Tensor:
        ctx.group, ctx.adjoint = group, adjoint
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.adjoint(gradients[0], ctx.group), None, None, None


Communicate = Callable[[Tensor, ProcessGroup], Tensor]


def with_adjoint(x: Tensor, group: ProcessGroup, forward: Communicate, adjoint: Communicate) -> Tensor:
    """`forward` of `x`, whose gradient is `adjoint` of the result's gradient. With one rank, `x`."""
    if group.size == 1:
        return x
    result: Tensor = _Adjoint.apply(x, group, forward, adjoint)  # type: ignore[no-untyped-call]
    return result


def unchanged(x: Tensor, _group: ProcessGroup) -> Tensor:
    """`x` itself."""
    return x.view_as(x)


@collective(overwrites=True)
def sum_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks, in the memory of `x` if it is contiguous."""
    total = x.detach().contiguous()
    group.all_reduce(total).wait()
    return total


@collective()
def gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's [batch, tokens, …], concatenated along the tokens."""
    rows = torch.empty(group.size, x.numel(), dtype=x.dtype, device=x.device)
    group.all_gather(rows, x.contiguous().view(-1)).wait()
    return rows.view(group.size, *x.shape).movedim(0, 1).flatten(1, 2)


@collective()
def gather_features(x: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's [..., features], concatenated along the features."""
    rows = torch.empty(group.size, x.numel(), dtype=x.dtype, device=x.device)
    group.all_gather(rows, x.contiguous().view(-1)).wait()
    return rows.view(group.size, *x.shape).movedim(0, -2).flatten(-2)


@collective()
def scatter_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [batch, tokens, …] over the ranks; each rank gets its share of the tokens."""
    parts = shares_of_tokens(x, group.size)
    share = torch.empty(parts.shape[1:], dtype=x.dtype, device=x.device)
    group.reduce_scatter(share.view(-1), parts.view(group.size, -1)).wait()
    return share


def shares_of_tokens(x: Tensor, ranks: int) -> Tensor:
    """[batch, tokens, …] to [ranks, batch, tokens / ranks, …]: each rank's share of the tokens is contiguous."""
    return x.reshape(x.shape[0], ranks, -1, *x.shape[2:]).movedim(1, 0).contiguous()


def take_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's share of the tokens of [batch, tokens, …]."""
    return x.chunk(group.size, dim=1)[group.rank].contiguous()


def take_features(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's share of the features."""
    return x.chunk(group.size, dim=-1)[group.rank]
