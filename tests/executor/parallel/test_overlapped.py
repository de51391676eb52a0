"""Products of tensor ranks beside their sums: the same numbers, and in which order things happen."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.tensor import ColumnLinear, RowLinear, TensorParallel, enter_through

RANKS, BATCH, TOKENS, WIDTH, HIDDEN = 2, 3, 10, 4, 6
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default, torch.ops.aten.addmm.out)


class Sent(InFlight):
    def __init__(self, happened: list[str]) -> None:
        super().__init__(lambda: None)
        self._happened = happened

    def wait(self) -> None:
        self._happened.append("wait")


class Echo(ProcessGroup):
    """Two ranks that have the same numbers, simulated by one process."""

    def __init__(self) -> None:
        super().__init__(None, RANKS, 1)
        self.happened: list[str] = []

    def all_reduce(self, value: Tensor, *_: Any) -> InFlight:
        value.mul_(RANKS)
        return self._sent("sum")

    def reduce_scatter(self, output: Tensor, rows: Tensor) -> InFlight:
        output.copy_(rows[self.rank] * RANKS)
        return self._sent("sum")

    def all_gather(self, rows: Tensor, shard: Tensor) -> InFlight:
        rows.copy_(shard.expand_as(rows))
        return self._sent("gather")

    def _sent(self, what: str) -> InFlight:
        self.happened.append(what)
        return Sent(self.happened)


class Products(TorchDispatchMode):
    """Tells of matrix products among what happens."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__()
        self._happened = happened

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self._happened.append("product")
        return func(*args, **(kwargs or {}))


class Layer:
    """Two column products and a row product, with biases and perhaps with adapters."""

    def __init__(self, sequence_parallel: bool, overlaps: bool, adapter: bool, trained: bool = True) -> None:
        self.group = Echo()
        self.tensor = TensorParallel(self.group, sequence_parallel, overlaps)
        self.gate, self.up = (ColumnLinear(WIDTH, RANKS * HIDDEN, self.tensor, bias=True) for _ in range(2))
        self.down = RowLinear(RANKS * HIDDEN, WIDTH, self.tensor, bias=True)
        self.matrices = (self.gate, self.up, self.down)
        for number, matrix in enumerate(self.matrices):
            matrix.requires_grad_(trained)
            if adapter:
                matrix.adapt(2)
            matrix.double()
            for place, parameter in enumerate(matrix.parameters()):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(10 * number + place))

    def run(self) -> Iterator[Tensor]:
        """The result, and the gradients of the input and of all parameters."""
        tokens = TOKENS // RANKS if self.tensor.sequence_parallel else TOKENS
        x = torch.randn(BATCH, tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with Products(self.group.happened):
            gate, up = enter_through(x, self.tensor, (self.gate, self.up))
            result = self.down(gate.sigmoid() * up)
            self.forward = [*self.group.happened]
            result.square().sum().backward()
        self.backward = self.group.happened[len(self.forward) :]
        given = (parameter.grad for matrix in self.matrices for parameter in matrix.parameters())
        return (value.detach() for value in (result, x.grad, *given) if value is not None)


@pytest.mark.parametrize(("sequence_parallel", "adapter", "trained"), [*itertools.product((False, True), repeat=3)])
def test_numbers_are_those_of_products_that_wait(sequence_parallel: bool, adapter: bool, trained: bool) -> None:
    waiting, beside = (Layer(sequence_parallel, overlaps, adapter, trained) for overlaps in (False, True))
    pairs = [*zip(waiting.run(), beside.run(), strict=True)]
    assert len(pairs) == 2 + 6 * trained + 6 * adapter
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_each_part_is_multiplied_while_the_one_before_travels(sequence_parallel: bool) -> None:
    layer = Layer(sequence_parallel, overlaps=True, adapter=False)
    [*layer.run()]
    gathered = ["gather", "wait"] * sequence_parallel
    assert layer.forward == [*gathered, "product", "product", *["product", "sum"] * 4, *["wait"] * 4]
    # The row product's two gradients, the input's from both columns, its sum beside the weights' gradients.
    assert layer.backward == [*gathered, *["product"] * 4, "sum", "product", "product", "wait"]


def test_fewer_rows_than_parts_are_as_many_messages() -> None:
    tensor = TensorParallel(group := Echo(), sequence_parallel=False, overlaps=True)
    tensor.multiply_rows(torch.ones(1, 3, WIDTH), torch.ones(HIDDEN, WIDTH))
    assert group.happened.count("sum") == 3


def test_one_rank_has_nothing_to_overlap() -> None:
    assert not TensorParallel(ProcessGroup(None, 1, 0), sequence_parallel=False, overlaps=True).overlaps
