"""Liger's kernels in compiled blocks: one graph, and the numbers of eager blocks.

`TRITON_INTERPRET=1 python -m pytest tests/executor/parallel/test_compiled_liger.py` runs the real kernels where Liger and
Triton are installed; elsewhere what stands in for them runs.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from fused_ranks import STAND_INS
from torch import Tensor, nn

from executor.parallel import fused
from executor.parallel.fused import LIGER_ARGUMENTS, LIGER_OPERATIONS, LigerFunctions, LigerOperators
from search_spaces.kernels import GATE, NORM, ROTATION
from search_spaces.models.model import ModelSpec

pytestmark = pytest.mark.filterwarnings("default")  # of what the compiler does inside it warns itself

SPEC = ModelSpec(
    name="small", family="llama", num_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=32, vocab_size=32, sequence_length=6,
)  # fmt: skip
BATCH, TOKENS = 2, 6


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[LigerOperators]:
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("liger_kernel") is not None:
        convert_floats(monkeypatch)
    else:
        monkeypatch.syspath_prepend(str(STAND_INS))
    module = importlib.import_module(LIGER_OPERATIONS)
    yield LigerOperators(LigerFunctions(*(getattr(module, name) for name in LIGER_ARGUMENTS)), {NORM, ROTATION, GATE})
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def convert_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter leaves Python's floats as they are, where a compiled kernel gets them as fp32, and functions of
    libdevice return nothing."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert, language = interpreter._implicit_cvt, interpreter.tl

    def converted(value: object) -> object:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(interpreter.np.array([value], dtype="float32"), language.float32)
        return language.tensor(handle, language.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(importlib.import_module("liger_kernel.ops.rms_norm"), "rsqrt", lambda x: 1 / language.sqrt(x))


class Block(nn.Module):
    """All three kernels, on rotated heads that are views as in attention."""

    def __init__(self, operators: LigerOperators, trains: bool) -> None:
        super().__init__()
        self.operators, self.norm = operators, operators.make_norm(SPEC)
        self.norm.requires_grad_(trains)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key = (part.view(BATCH, TOKENS, -1, 8).transpose(1, 2) for part in (normed * 2, normed[..., :16] * 3))
        query, key = self.operators.rotate(query, key, cosines, sines)
        rotated = query.transpose(1, 2).flatten(2) + key.transpose(1, 2).flatten(2).repeat(1, 1, 2)
        return self.operators.gate(rotated, x * 0.5, "silu")


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_a_block_is_one_graph_with_the_numbers_of_an_eager_one(
    operators: LigerOperators, trains: bool, recomputes: bool
) -> None:
    torch.manual_seed(0)
    block = Block(operators, trains)
    with torch.no_grad():
        block.norm.weight.uniform_(0.5, 1.5)  # type: ignore[operator]
    angles = torch.rand(TOKENS, 4).repeat(1, 2)
    given = torch.randn(BATCH, TOKENS, 32)

    def run(x: Tensor) -> Tensor:
        inputs = x, angles.cos(), angles.sin()
        recompute = partial(torch.utils.checkpoint.checkpoint, block, use_reentrant=False)
        result: Tensor = recompute(*inputs) if recomputes else block(*inputs)
        return result

    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        x = given.clone().requires_grad_()
        block.zero_grad()
        result = call(x)
        result.square().sum().backward()  # type: ignore[no-untyped-call]
        results.append([result.detach(), x.grad, block.norm.weight.grad])
    torch._dynamo.reset()
    for eager, compiled in zip(*results, strict=True):
        assert (eager is None) == (compiled is None)
        if eager is not None:
            torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=1e-6)
    assert (results[0][2] is not None) == trains


def test_operators_give_the_shapes_and_strides_of_their_results(operators: LigerOperators) -> None:
    x, weight, heads = torch.randn(BATCH, TOKENS, 32), torch.ones(32), torch.randn(BATCH, TOKENS, 4, 8).transpose(1, 2)
    tables = torch.rand(1, TOKENS, 8), torch.rand(1, TOKENS, 8)
    calls = {
        "_norm_rows": (x, weight, 1e-6),
        "_norm_gradients": (x, x, weight, torch.ones(BATCH * TOKENS), True),
        "_rotate": (heads, heads[:, :2].contiguous(), *tables, False),
        "_gated": (x, x.clone()),
        "_gate_gradients": (x, x.clone(), x.clone()),
    }
    for name, arguments in calls.items():
        before = [value.clone() for value in arguments if isinstance(value, Tensor)]
        torch.library.opcheck(getattr(torch.ops.autotune, name), arguments, test_utils=("test_schema", "test_faketensor"))
        changed = [value for value in arguments if isinstance(value, Tensor)]
        assert all(map(torch.equal, before, changed)), "an operator changes none of its arguments"
    assert fused.NORM_SETTINGS[2] is False
