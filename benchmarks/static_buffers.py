"""A stand-in for CUDA graphs on CPUs that holds its user to their contract, and answers from static buffers as they do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx

from executor.parallel.graphs import Call, Capture, Held


class ContractBreachError(RuntimeError):
    """What a CUDA graph would have computed is not what was asked for. It would not have said so."""


class StaticBuffers(Capture):
    """`torch.cuda.make_graphed_callables` on a CPU.

    1. What a capture records are operators on tensors, forward and backward: Python is not run again, and what asks for a
       tensor's value fails. (Backward is recorded with the forward that it needs, and computes that once more.)
    2. A call copies its input into the sample, runs the operators, and gives out the same storage each time, as backward does
       for each gradient.
    3. Where a graph would go on with what is wrong now, it raises: other shapes (a copy would spread the smaller one), moved
       parameters or another `requires_grad`, a replay that overwrites what a backward still needs, and another order.
    """

    device_type = "cpu"

    def __init__(self) -> None:
        self.graphs: list[_Graph] = []
        self.waiting: list[_Graph] = []
        """Whose forward was replayed and whose backward was not."""

    def graph(self, calls: Sequence[nn.Module], samples: Sequence[Tensor]) -> Sequence[Call]:
        self.graphs += [_Graph(self, call, sample) for call, sample in zip(calls, samples, strict=True)]
        return self.graphs

    def held(self) -> Held:
        """Of the static buffers, each with memory of its own: what a CUDA graph's replays use beside them is not there."""
        size = sum(value.nbytes for graph in self.graphs for value in graph.buffers())
        return Held(size, size)


class _Graph:
    """One callable."""

    def __init__(self, capture: StaticBuffers, call: nn.Module, sample: Tensor) -> None:
        if call._forward_hooks or call._forward_pre_hooks or call._backward_hooks:
            raise ContractBreachError("a module with hooks on it is captured")
        self._capture, self._sample = capture, sample
        self._parameters = [(value, value.data_ptr(), value.requires_grad) for value in call.parameters()]
        self._inputs = [sample, *(value for value, *_ in self._parameters)]
        self._trained = [value for value in self._inputs if value.requires_grad]
        with torch.no_grad():
            self._forward = make_fx(call)(sample)
            self._output = torch.empty_like(self._forward(sample))
        self._incoming = torch.zeros_like(self._output)
        self._backward = make_fx(lambda x, gradient: torch.autograd.grad(call(x), self._trained, gradient))(
            sample, self._incoming
        )
        self._gradients = {id(value): torch.empty_like(value) for value in self._trained}

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = _Replayed.apply(self, x, *self._inputs[1:])  # type: ignore[no-untyped-call]
        return result

    def buffers(self) -> list[Tensor]:
        """Every storage that lives from replay to replay."""
        return [self._sample, self._output, self._incoming, *self._gradients.values()]

    def replay(self, x: Tensor) -> Tensor:
        self._check(x)
        with torch.no_grad():
            self._sample.copy_(x)
            self._output.copy_(self._forward(self._sample))
        self._capture.waiting.append(self)
        return self._output.detach()

    def replay_backward(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        waiting = self._capture.waiting
        if not waiting or waiting.pop() is not self:
            raise ContractBreachError("backward is replayed in another order than it was captured in")
        self._incoming.copy_(gradient)
        with torch.no_grad():
            found = self._backward(self._sample, self._incoming)
        for value, new in zip(self._trained, found, strict=True):
            self._gradients[id(value)].copy_(new)
        given = (self._gradients.get(id(value)) for value in self._inputs)
        return tuple(None if value is None else value.detach() for value in given)

    def _check(self, x: Tensor) -> None:
        if (x.shape, x.dtype, x.requires_grad) != (self._sample.shape, self._sample.dtype, self._sample.requires_grad):
            raise ContractBreachError(f"an input of {tuple(x.shape)} comes where {tuple(self._sample.shape)} was captured")
        if any(value.data_ptr() != address for value, address, _ in self._parameters):
            raise ContractBreachError("a parameter has moved since the capture: the old memory would be read")
        if any(value.requires_grad != trained for value, _, trained in self._parameters):
            raise ContractBreachError("requires_grad of a parameter has changed since the capture")
        if self in self._capture.waiting:
            raise ContractBreachError("a replay would overwrite what a backward still needs")
        if len(self._capture.waiting) != self._capture.graphs.index(self):
            raise ContractBreachError("forward is replayed in another order than it was captured in")


class _Replayed(torch.autograd.Function):
    """As torch's own: the gradients that it returns are the static buffers."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, x: Tensor, *_: Tensor) -> Tensor:
        ctx.graph = graph
        return graph.replay(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.graph.replay_backward(gradients[0]))
