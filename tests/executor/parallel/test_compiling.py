"""Compiled blocks: what a trial tells of them, and that counting FLOPs leaves them compiled."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from executor.engine import RankContext
from executor.engines.capabilities import version_refusals
from executor.measurement.flop_counter import FlopCounter
from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.graphs import compile_blocks, compile_seconds, forget_compiled
from executor.trial.run import run_trial
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of what the compiler does inside it warns itself
    pytest.mark.nightly,  # `make oldest` runs them too
]

SMALL = ModelSpec(
    name="small", family="llama", num_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    ffn_hidden_size=24, vocab_size=32, sequence_length=16,
)  # fmt: skip
EXACT = TrialConfig(compile_blocks=True, precision="fp64")
PRECISION, BOUND = ("fp32", 1e-6) if version_refusals(torch.__version__, EXACT, "cpu") else ("fp64", 1e-12)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    forget_compiled()
    yield
    forget_compiled()


def trial(compiled: bool) -> TrialResult:
    request = TrialRequest(
        attempt="one", model=SMALL, config=TrialConfig(compile_blocks=compiled, precision=PRECISION), world_size=1,
        workload=Workload(global_batch_size=2, sequence_length=16),
        fidelity=Fidelity(min_steps=2, max_steps=2, max_seconds=0.1),
    )  # fmt: skip
    return run_trial(RankContext(rank=0, world_size=1, device=torch.device("cpu")), request, lambda _: None)


def block(**knobs: object) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    checkpoint_blocks([module], TrialConfig(compile_blocks=True, **knobs))  # type: ignore[arg-type]
    compile_blocks([module])
    return module


def loss_of(module: nn.Module) -> Tensor:
    loss: Tensor = module(torch.ones(2, 4, requires_grad=True)).sum()
    return loss


def test_a_compiled_trial_trains_the_same_and_tells_its_compile_time_apart() -> None:
    compiled, plain = trial(compiled=True), trial(compiled=False)
    assert compiled.outcome == plain.outcome == Outcome.OK
    assert compiled.losses == pytest.approx(plain.losses, rel=BOUND)
    assert compiled.phase_seconds["compile"] > 0.0
    assert "compile" not in plain.phase_seconds
    assert compile_seconds() == 0.0, "what was compiled for a model that is gone is forgotten"


def test_a_counted_step_leaves_what_was_compiled_in_use() -> None:
    module = block()
    kinds = []
    for counted in (False, True, False):
        with FlopCounter() if counted else contextlib.nullcontext():
            loss = module(torch.ones(2, 4, requires_grad=True))
            kinds.append(type(loss.grad_fn).__name__)
            loss.sum().backward()
    assert kinds == ["CompiledFunctionBackward", "GeluBackward0", "CompiledFunctionBackward"]


def test_a_counter_that_entered_itself_for_a_composite_operator_leaves_compilation_on() -> None:
    module = block()
    with FlopCounter() as counter, torch.inference_mode():
        nn.functional.linear(torch.ones(2, 4), torch.ones(4, 4))
    assert counter.total == 2 * 2 * 4 * 4
    assert type(module(torch.ones(2, 4, requires_grad=True)).grad_fn).__name__ == "CompiledFunctionBackward"
