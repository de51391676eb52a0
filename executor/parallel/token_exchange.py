"""All-to-all of tokens between the ranks that divide the experts, waited for or overlapped with the shared expert.

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

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from executor.parallel.checkpointing import keep_collective
from executor.parallel.collectives import InFlight, ProcessGroup


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
