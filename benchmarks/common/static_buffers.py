"""A replacement for CUDA graphs on CPUs that enforces their contract, and returns static buffers as they do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx

from executor.parallel.graphs import Call, Capture, Held


class ContractBreachError(RuntimeError):
    """A CUDA graph would silently have computed a wrong result."""


class StaticBuffers(Capture):
    """`torch.cuda.make_graphed_callables` on a CPU.

    1. A capture records the operators on tensors, forward and backward: Python does not run again, and reading a tensor's
       value fails. (Backward is recorded with the forward that it needs, and recomputes it.)
    2. A call copies its input into the sample, runs the operators, and returns the same storage each time; so does backward
       for each gradient.
    3. It raises where a graph would silently continue with wrong data: other shapes (a copy would broadcast the smaller one),
       moved parameters, a changed `requires_grad`, a replay that overwrites data that a backward still needs, another order.
    """

    device_type = "cpu"

    def __init__(self) -> None:
        self.graphs: list[_Graph] = []
        self.waiting: list[_Graph] = []
        """Graphs whose forward was replayed and whose backward was not."""

    def graph(self, calls: Sequence[nn.Module], samples: Sequence[Tensor]) -> Sequence[Call]:
        self.graphs += [_Graph(self, call, sample) for call, sample in zip(calls, samples, strict=True)]
        return self.graphs

    def held(self) -> Held:
        """Bytes of the static buffers, each with its own memory; a CUDA graph's further memory does not exist here."""
        size = sum(value.nbytes for graph in self.graphs for value in graph.buffers())
        return Held(size, size)


class _Graph:
    """One captured callable."""

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
        """Every tensor that persists between replays."""
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
    """Like torch's own: the returned gradients are the static buffers."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, x: Tensor, *_: Tensor) -> Tensor:
        ctx.graph = graph
        return graph.replay(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.graph.replay_backward(gradients[0]))
