"""Compiled blocks that communicate: one graph each, the numbers of uncompiled ones, and everything sent is counted."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from executor.errors import EngineRefusalError
from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.context import METHODS
from executor.parallel.graphs import compile_blocks, forget_compiled
from executor.parallel.model import Block, RankModel, whole
from executor.parallel.operators import rotary_table
from executor.parallel.tensor import TensorParallel
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.filterwarnings("default")  # of what the compiler does inside it warns itself
RANKS, BATCH, TOKENS = 2, 2, 8
SPEC = ModelSpec(
    name="block", family="llama", num_layers=1, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    ffn_hidden_size=12, vocab_size=32, sequence_length=TOKENS,
)  # fmt: skip


class Echo(ProcessGroup):
    """Two ranks that have the same numbers, simulated by one process."""

    def __init__(self) -> None:
        super().__init__(None, RANKS, 1)

    def all_reduce(self, value: Tensor, *_: Any) -> InFlight:
        self.count("all_reduce", value)
        value.mul_(RANKS)
        return InFlight(lambda: None)

    def reduce_scatter(self, output: Tensor, rows: Tensor) -> InFlight:
        self.count("reduce_scatter", rows)
        output.copy_(rows[self.rank] * RANKS)
        return InFlight(lambda: None)

    def all_gather(self, rows: Tensor, shard: Tensor) -> InFlight:
        self.count("all_gather", rows)
        rows.copy_(shard.expand_as(rows))
        return InFlight(lambda: None)

    def all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], returns: bool = False
    ) -> InFlight:
        self.count("all_to_all", parts)
        output.copy_(parts[self.rank].expand_as(output))
        return InFlight(lambda: None)


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile to the operators of torch: seconds less than to machine code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters.clear()
    yield
    forget_compiled()


def tensor_ranks(group: Echo, sequence: bool, overlaps: bool) -> RankModel:
    return replace(whole(SPEC), tensor=TensorParallel(group, sequence_parallel=sequence, overlaps=overlaps))


def context_ranks(group: Echo, method: str) -> RankModel:
    return replace(whole(SPEC), context=METHODS[method](group))


LAYOUTS: dict[str, Callable[[Echo], RankModel]] = {
    **{
        f"tensor{', sequence' * sequence}{', overlapped' * overlaps}": partial(
            tensor_ranks, sequence=sequence, overlaps=overlaps
        )
        for sequence, overlaps in itertools.product((False, True), repeat=2)
    },
    **{method: partial(context_ranks, method=method) for method in METHODS},
}


def outcome(
    part: RankModel, group: Echo, checkpointing: str, compiled: bool
) -> tuple[list[Tensor], dict[str, tuple[int, int]]]:
    """The block's result and every gradient of its second step, and what the step sent."""
    torch.manual_seed(0)
    block = Block(SPEC, part, 0).double()
    for value in block.parameters():
        nn.init.normal_(value, std=0.1)
    checkpoint_blocks([block], TrialConfig(activation_checkpointing=checkpointing))
    if compiled:
        compile_blocks([block])
    tokens = TOKENS // RANKS if part.tensor.sequence_parallel or part.context.size > 1 else TOKENS
    length = TOKENS if part.context.size == 1 else tokens
    rotary = tuple(table[:length].double() for table in rotary_table(SPEC, TOKENS))
    for _ in range(2):
        x = torch.randn(BATCH, tokens, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        block.zero_grad()
        group.sent.clear()
        result = block(x, rotary)
        result.square().sum().backward()
    gradients = [value.grad for value in (x, *block.parameters()) if value.grad is not None]
    return [result.detach(), *gradients], dict(group.sent)


@pytest.mark.prove(every=12)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_one_graph_with_the_numbers_and_messages_of_an_uncompiled_one(layout: str, checkpointing: str) -> None:
    group = Echo()
    part = LAYOUTS[layout](group)
    expected, sent = outcome(part, group, checkpointing, compiled=False)
    assert sent
    actual, compiled_sent = outcome(part, group, checkpointing, compiled=True)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    assert len(actual) == len(expected) == 11
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    if checkpointing != "full":  # where the compiler computes what backward needs again, and no more
        assert compiled_sent == sent


def test_names_of_groups_are_free_again_for_the_next_trial() -> None:
    first, second = Echo(), Echo()
    name = first.name
    assert name != second.name
    assert ProcessGroup.by_name[name] is first
    del first
    assert Echo().name == name


class Split(nn.Module):
    """A block of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x))
        torch._dynamo.graph_break()
        return torch.sin(hidden)


def test_parts_of_a_block_that_is_not_one_graph_are_compiled_inside_its_checkpoint() -> None:
    block, x = Split(), torch.ones(2, 4)
    (wanted,) = torch.autograd.grad(block(x).sum(), block.linear.weight)
    checkpoint_blocks([block], TrialConfig(activation_checkpointing="full"))
    compile_blocks([block])
    for _ in range(2):
        (gradient,) = torch.autograd.grad(block(x).sum(), block.linear.weight)
        torch.testing.assert_close(gradient, wanted)
    assert counters["stats"]["unique_graphs"] > 1


def test_such_a_block_is_not_checkpointed_selectively() -> None:
    block = Split()
    checkpoint_blocks([block], TrialConfig(activation_checkpointing="selective"))
    compile_blocks([block])
    with pytest.raises(EngineRefusalError, match="not one graph") as refused:
        block(torch.ones(2, 4))
    assert refused.value.rule == "compile-selective"
