"""Liger beside compiled blocks: the compiler fuses norms, rotations and gates itself, Liger has the loss."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.parallel.fused import LigerFunctions, LigerOperators
from executor.parallel.operators import Operators
from search_spaces.kernels import GATE, LOSS, NORM, ROTATION
from search_spaces.models.model import ModelSpec

SPEC = ModelSpec(
    name="small", family="llama", num_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=32, vocab_size=32, sequence_length=6,
)  # fmt: skip


class Called(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *_operands: Any) -> Tensor:
        raise AssertionError("a kernel of Liger ran")


class Block(nn.Module):
    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self.operators, self.norm = operators, operators.make_norm(SPEC)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        query, key = (part.view(2, 6, -1, 8).transpose(1, 2) for part in (self.norm(x) * 2, self.norm(x)[..., :16] * 3))
        query, key = self.operators.rotate(query, key, cosines, sines)
        rotated = query.transpose(1, 2).flatten(2) + key.transpose(1, 2).flatten(2).repeat(1, 1, 2)
        return self.operators.gate(rotated, x * 0.5, "silu")


@pytest.mark.filterwarnings("default")  # of what the compiler does inside it warns itself
def test_a_compiled_block_is_one_graph_of_torchs_operators() -> None:
    operators = LigerOperators(LigerFunctions(Called, Called, Called, Called), {NORM, ROTATION, GATE, LOSS})
    blocks = [Block(operators), Block(Operators())]
    angles, given = torch.rand(6, 4).repeat(1, 2), torch.randn(2, 6, 32)
    with pytest.raises(AssertionError, match="a kernel of Liger ran"):
        blocks[0](given, angles.cos(), angles.sin())
    results = []
    for block in blocks:
        x = given.clone().requires_grad_()
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        result = compiled(x, angles.cos(), angles.sin())
        result.square().sum().backward()
        results.append([result.detach(), x.grad, block.norm.weight.grad])
    for mine, plain in zip(*results, strict=True):
        assert mine is not None and torch.equal(mine, plain)
