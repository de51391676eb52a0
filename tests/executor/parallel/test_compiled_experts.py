"""Blocks whose experts are on several ranks, compiled: one graph whatever each rank receives, with the numbers of uncompiled
blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.experts import Experts
from executor.parallel.graphs import compile_blocks, forget_compiled
from executor.parallel.model import Block, RankModel, whole
from executor.parallel.operators import rotary_table
from executor.parallel.tensor import TensorParallel
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.filterwarnings("default")  # of what the compiler does inside it warns itself
RANKS, BATCH, TOKENS = 2, 2, 8
SPEC = ModelSpec(
    name="experts", family="mixtral", num_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=24, vocab_size=32, sequence_length=TOKENS, num_experts=8, experts_per_token=2,
)  # fmt: skip
SPECS = {
    "mixtral": SPEC,
    "capacity": replace(SPEC, capacity_factor=1.0),
    "balance": replace(SPEC, load_balance=0.1),
    "shared": replace(SPEC, shared_expert_size=24),
    "biases": replace(SPEC, mlp_bias=True),
}
STEPS = 4


class Other(ProcessGroup):
    """Two ranks, of which the other one sends this one what this one sends itself."""

    def __init__(self) -> None:
        super().__init__(None, RANKS, 1)
        self.received: set[int] = set()
        """The numbers of rows that messages had."""

    def all_reduce(self, value: Tensor, *_: Any) -> InFlight:
        self.count("all_reduce", value)
        value.mul_(RANKS)
        return InFlight(lambda: None)

    def all_gather(self, rows: Tensor, shard: Tensor) -> InFlight:
        self.count("all_gather", rows)
        rows.copy_(shard.expand_as(rows))
        return InFlight(lambda: None)

    def all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], returns: bool = False
    ) -> InFlight:
        self.count("all_to_all", output if returns else parts)
        self.received.add(len(output))
        mine = parts.split(list(sent))[self.rank]
        for target in output.split(list(received)):
            target.copy_(mine[: len(target)] if len(mine) >= len(target) else torch.ones_like(target))
        return InFlight(lambda: None)


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile to the operators of torch: seconds less than to machine code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters.clear()
    yield
    forget_compiled()


def outcome(
    spec: ModelSpec, part: RankModel, group: Other, dtype: torch.dtype, checkpointing: str, compiled: bool
) -> tuple[list[Tensor], dict[str, tuple[int, int]]]:
    """Results and gradients of all steps, in the last of which this rank's experts get no row, and what they sent."""
    torch.manual_seed(0)
    block = Block(spec, part, 0).to(dtype)
    for value in block.parameters():
        nn.init.normal_(value, std=0.1)
    checkpoint_blocks([block], TrialConfig(activation_checkpointing=checkpointing))
    if compiled:
        compile_blocks([block])
    rotary = tuple(table.to(dtype) for table in rotary_table(spec, TOKENS))
    numbers = []
    group.sent.clear()
    assert isinstance(block.mlp, Experts)
    for step in range(STEPS):
        if step == STEPS - 1 and not spec.capacity_factor:
            with torch.no_grad():
                block.mlp.router.weight[4:] = -1
                block.mlp.router.weight[:4] = 1 + torch.rand(4, 16, dtype=dtype)
                block.mlp_norm.weight.fill_(1)
        x = torch.randn(BATCH, TOKENS, 16, dtype=dtype, generator=torch.Generator().manual_seed(step))
        x = (x if step < STEPS - 1 else x.abs() + 2).requires_grad_()
        block.zero_grad()
        result = block(x, rotary)
        result.square().sum().backward()
        numbers += [result.detach(), *(value.grad for value in (x, *block.parameters()) if value.grad is not None)]
    return numbers, dict(group.sent)


CASES = [
    *((name, "none", torch.float64) for name in SPECS),
    ("mixtral", "none", torch.bfloat16),
    *(("shared", checkpointing, dtype) for checkpointing in ("full", "selective") for dtype in (torch.float64, torch.bfloat16)),
    ("divided", "none", torch.float64),
]


@pytest.mark.prove
@pytest.mark.parametrize(("name", "checkpointing", "dtype"), CASES)
def test_one_graph_has_the_numbers_and_messages_of_an_uncompiled_block(
    name: str, checkpointing: str, dtype: torch.dtype
) -> None:
    group = Other()
    spec, part = SPECS.get(name, SPECS["balance"]), replace(whole(SPEC), expert=group)
    if name == "divided":  # each tensor rank has a share of the tokens
        tensor = TensorParallel(Other(), sequence_parallel=False)
        part = replace(part, tensor=tensor, expert_tensor=whole(SPEC).tensor)
    expected, sent = outcome(spec, part, group, dtype, checkpointing, compiled=False)
    assert sent["all_to_all"][0] > 0
    assert spec.capacity_factor or (len(group.received) > 3 and 0 in group.received)
    actual, compiled_sent = outcome(spec, part, group, dtype, checkpointing, compiled=True)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    bound = 1e-12 if dtype == torch.float64 else 0.05
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() <= bound * max(1.0, float(other.abs().max()))
    if checkpointing != "full":  # where the compiler computes what backward needs again, and no more
        assert compiled_sent == sent
