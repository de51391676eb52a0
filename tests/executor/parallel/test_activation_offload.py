"""What blocks save on the host: the same gradients to the bit, and every byte where it should be."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from executor.engine import RankContext
from executor.parallel.activation_offload import LEAST_BYTES, ActivationOffload
from executor.trial.run import run_trial
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, RankMeasurement, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

CPU = torch.device("cpu")
WIDTH, ROWS, DEPTH = 16, 64, 5
INPUT_BYTES = 4 * WIDTH * ROWS
WORKLOAD = Workload(global_batch_size=4, sequence_length=64)
SPEC = ModelSpec(
    name="offloaded", family="llama", num_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ffn_hidden_size=96, vocab_size=64, sequence_length=64,
)  # fmt: skip


class Block(nn.Module):
    """Saves its input (for both products) and what comes out of the nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        gate: Tensor = self.one(x).sigmoid()
        result: Tensor = gate * self.other(x) * factor
        return result


SAVED = 3 * INPUT_BYTES
"""By a block: its input, the gate and the second product; the factor is every block's."""


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(DEPTH))


def run(stack: nn.ModuleList) -> tuple[list[Tensor], Tensor]:
    """Gradients of the parameters and of the input."""
    torch.manual_seed(1)
    given, factor = torch.randn(ROWS, WIDTH, requires_grad=True), torch.rand(ROWS, WIDTH)
    x = given
    for block in stack:
        x = block(x, factor)
    stack.zero_grad()
    x.square().sum().backward()
    assert given.grad is not None
    return [value.grad.clone() for value in stack.parameters() if value.grad is not None], given.grad


@pytest.mark.parametrize("keeps_last", [True, False])
def test_gradients_are_the_same_and_every_tensor_leaves_once(keeps_last: bool) -> None:
    expected, expected_input = run(blocks())
    stack, offload = blocks(), ActivationOffload(CPU)
    offload.attach([*stack], keeps_last)
    for _ in range(3):
        gradients, of_input = run(stack)
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
        assert torch.equal(of_input, expected_input)
        # No step after the first makes a buffer, and nobody has one when the graph is gone.
        assert offload.pool.bytes == SAVED * (DEPTH - keeps_last)
        assert sum(len(free) for free in offload._free.values()) == len(offload.pool.tensors())
    offload.close()


def test_without_gradients_nothing_leaves() -> None:
    stack, offload = blocks(), ActivationOffload(CPU)
    offload.attach([*stack], keeps_last=False)
    with torch.no_grad():
        stack[0](torch.ones(ROWS, WIDTH), torch.ones(()))
    assert offload.pool.bytes == 0


class Keeping(torch.autograd.Function):
    """Saves views of its input, and tells in backward what came back."""

    came: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.t(), x[:, ::2], x[:1, :1])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Keeping.came = list(ctx.saved_tensors)
        return gradients[0]


class Saver(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Keeping.apply(x)  # type: ignore[no-untyped-call]
        return result


def test_views_come_back_with_their_strides_and_small_ones_stay() -> None:
    offload, block = ActivationOffload(CPU), Saver()
    offload.attach([block], keeps_last=False)
    x = torch.randn(32, 32, requires_grad=True)
    block(x).sum().backward()
    whole, turned, strided, small = Keeping.came
    assert torch.equal(whole, x)
    assert torch.equal(turned, x.t())
    assert torch.equal(strided, x[:, ::2])
    assert torch.equal(small, x[:1, :1])
    assert (whole.stride(), turned.stride()) == ((32, 1), (1, 32))
    assert small.nbytes < LEAST_BYTES
    assert offload.pool.bytes == x.nbytes + x.nbytes // 2  # the turned one is the whole one


def test_a_second_backward_fetches_again() -> None:
    stack, offload = blocks(), ActivationOffload(CPU)
    offload.attach([*stack], keeps_last=False)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    result = x
    for block in stack:
        result = block(result, torch.ones(()))
    grad: Callable[..., tuple[Tensor, ...]] = torch.autograd.grad
    (first,) = grad(result.sum(), x, retain_graph=True)
    (second,) = grad(result.sum(), x)
    assert torch.equal(first, second)


def measured(layers: int, offload: bool, **knobs: Any) -> RankMeasurement:
    request = TrialRequest(
        attempt="one", model=dataclasses.replace(SPEC, num_layers=layers), world_size=1, workload=WORKLOAD,
        config=TrialConfig(micro_batch_size=4, offload_activations=offload).replace(knobs),
        fidelity=Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2),
    )  # fmt: skip
    result = run_trial(RankContext(rank=0, world_size=1, device=CPU), request, lambda _: None)
    assert result.outcome is Outcome.OK
    return result.ranks[0]


TOKENS = 4 * 64


@pytest.mark.nightly
def test_layers_beyond_two_take_host_memory_alone() -> None:
    """On the device as much is there at the peak of four layers as of six; on the host each takes the same."""
    few, many = measured(4, True), measured(6, True)
    assert few.memory_by_tag["activations"] == many.memory_by_tag["activations"]
    assert few.host_memory_bytes % 3 == 0
    assert many.host_memory_bytes == few.host_memory_bytes // 3 * 5
    plain_few, plain_many = measured(4, False), measured(6, False)
    grown = plain_many.memory_by_tag["activations"] - plain_few.memory_by_tag["activations"]
    assert grown == 2 * few.host_memory_bytes // 3


def test_of_blocks_that_run_again_the_inputs_leave() -> None:
    told = measured(4, True, activation_checkpointing="full")
    assert told.host_memory_bytes == 3 * 4 * SPEC.hidden_size * TOKENS
