"""Checkpointing computes the same numbers, keeps less, and never exchanges more on one rank than on another."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from executor.engine import TAGS, RankContext
from executor.engines import session
from executor.engines.native.engine import NativeEngine
from executor.measurement.memory import account_step
from executor.parallel import checkpointing
from executor.parallel.checkpointing import checkpoint_blocks
from executor.runners.local import LocalRunner
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

WIDTH = 32
TOKENS = 48
LAYERS = 4
CPU = torch.device("cpu")


class Block(nn.Module):
    """Attention and a gated MLP around norms: every kind of operator that a policy tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norms[0](x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = self.norms[1](x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return result


def blocks(kind: str, every: int = 1, **knobs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).double()
    values = {"activation_checkpointing": kind, "checkpoint_every_k": every, **knobs}
    checkpoint_blocks(list(model), TrialConfig().replace(values))
    return model


def inputs() -> Tensor:
    drawn = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn.requires_grad_()


@pytest.mark.parametrize(("stage", "calls"), [(0, [2, 2, 2, 1]), (1, [1, 1, 1, 1]), (2, [2, 2, 2, 2])])
def test_a_layout_runs_the_first_blocks_of_its_own_stage_again(stage: int, calls: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).double()
    layout = TrialConfig(pipeline_parallel_size=3, pipeline_layout="4f3-4-4s", activation_checkpointing="full")
    checkpoint_blocks(list(model), layout, stage)
    outcome(model, inputs())
    assert [block.calls for block in model] == calls


@pytest.mark.parametrize("draws", [True, False])
def test_random_states_are_read_where_blocks_may_draw_alone(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, state = [], torch.get_rng_state

    def read() -> Tensor:
        reads.append(state())
        return reads[-1]

    monkeypatch.setattr(torch, "get_rng_state", read)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).double()
    checkpoint_blocks(list(model), TrialConfig(activation_checkpointing="full"), draws=draws)
    outcome(model, inputs())
    assert bool(reads) is draws


def factory() -> tuple[nn.Module, object]:
    """A user's module: its call gives the loss."""
    return UserModule(), lambda size, generator: {"x": torch.randn(size, 4, generator=generator)}


class UserModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_our_own_model_draws_nothing_and_a_users_may(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(session, "checkpoint_blocks", lambda *_, draws: told.append(draws))
    own = ModelSpec(
        name="own", family="llama", num_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        ffn_hidden_size=8, vocab_size=8, sequence_length=4,
    )  # fmt: skip
    for model in (own, FactoryModel(reference=f"{__name__}:factory", parameter_count=32)):
        context = RankContext(rank=0, world_size=1, device=CPU)
        NativeEngine().build(context, model, TrialConfig(), Workload(global_batch_size=1, sequence_length=4)).close()
    assert told == [False, True]


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss, the input's gradient and every parameter's."""
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(value.grad for value in (x, *model.parameters()) if value.grad is not None)]


@functools.cache
def activation_peak(kind: str, every: int = 1) -> int:
    model, x = blocks(kind, every), inputs()
    outcome(model, x)

    def storages() -> list[tuple[str, Tensor]]:
        owned = [("parameters", value.data) for value in model.parameters()]
        return [*owned, *(("gradients", value.grad) for value in (x, *model.parameters()) if value.grad is not None)]

    account = account_step(lambda: outcome(model, x), storages, CPU)
    assert set(account.tag_peaks) <= {*TAGS}
    return account.tag_peaks["activations"]


@pytest.mark.parametrize(("kind", "every"), [("selective", 1), ("selective", 3), ("full", 1), ("full", 2), ("full", LAYERS)])
def test_loss_and_gradients_are_the_same_to_the_bit(kind: str, every: int) -> None:
    wanted = outcome(blocks("none"), inputs())
    got = outcome(blocks(kind, every), inputs())
    assert len(got) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("every", "run_again"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3]), (LAYERS, [0])])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_the_first_of_every_k_blocks_runs_again(kind: str, every: int, run_again: list[int]) -> None:
    model = blocks(kind, every)
    outcome(model, inputs())
    assert [index for index, block in enumerate(model) if block.calls == 2] == run_again  # type: ignore[comparison-overlap]


@pytest.mark.nightly
def test_peaks_fall_from_none_over_selective_to_full() -> None:
    none, selective, full = (activation_peak(kind, 1) for kind in ("none", "selective", "full"))
    assert full < selective < none
    for kind, least in (("selective", selective), ("full", full)):
        every = [activation_peak(kind, k) for k in (1, 2, LAYERS)]
        assert every == sorted(every)
        assert every[0] == least < every[1] < none


def test_selective_keeps_the_dear_results_alone() -> None:
    """What each block holds after forward, in closed form: its input and the results of its products and attention."""
    model, x = blocks("selective"), inputs()
    kept = 2 * TOKENS * (3 + 1 + 1 + 2 * 2 + 1) * WIDTH * 8 + 2 * 4 * TOKENS * 8
    held: list[Tensor] = []
    account = account_step(lambda: held.append(model(x)), list, CPU)
    block_output = 2 * TOKENS * WIDTH * 8
    assert account.peak >= LAYERS * (kept + block_output)
    assert account.peak <= LAYERS * (kept + block_output) + 8 * block_output


def test_what_backward_runs_again_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    again: Counter[str] = Counter()

    def count(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        again[str(func)] += func not in checkpointing.KEPT
        return dispatch(self, func, types, args, kwargs)

    dispatch = checkpointing._Recalling.__torch_dispatch__
    monkeypatch.setattr(checkpointing._Recalling, "__torch_dispatch__", count)
    outcome(blocks("selective"), inputs())
    assert again["aten.silu.default"] == LAYERS
    assert not any(again[name] for name in again if "mm" in name or "attention" in name)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_backward_in_parts_as_zero_bubble_schedules_call_it(kind: str) -> None:
    def in_parts(model: nn.Module) -> list[Tensor]:
        x = inputs()
        loss = model(x).square().mean()
        given, groups = stage_backward_input([loss], None, [x], iter(model.parameters()))
        stage_backward_weight(iter(model.parameters()), groups)
        return [*(one for one in given if one is not None), *(value.grad for value in model.parameters())]  # type: ignore[list-item]

    knobs = {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"}
    wanted, got = in_parts(blocks("none")), in_parts(blocks(kind, **knobs))
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu_().square()


def test_a_result_that_the_block_changes_in_place_is_computed_again() -> None:
    block, x = Overwriting(), torch.randn(4, WIDTH)
    (wanted,) = torch.autograd.grad(block(x).sum(), block.linear.weight)
    checkpoint_blocks([block], TrialConfig(activation_checkpointing="selective"))
    (gradient,) = torch.autograd.grad(block(x).sum(), block.linear.weight)
    assert torch.equal(gradient, wanted)


class FlipFlop(nn.Module):
    """Runs another operator each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.turns = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x if next(self.turns) % 2 else self.linear(x))


def test_a_block_that_runs_otherwise_is_an_error() -> None:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), FlipFlop(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())
    checkpoint_blocks([block], TrialConfig(activation_checkpointing="selective"))
    with pytest.raises(RuntimeError, match="runs differently each time"):
        block(torch.randn(4, WIDTH)).sum().backward()


SPEC = ModelSpec(
    name="checkpointing", family="llama", num_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, ffn_hidden_size=96, vocab_size=64, sequence_length=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(forked_ranks: None) -> Iterator[LocalRunner]:
    environment = {"PYTHONPATH": str(Path(__file__).parents[1] / "engines" / "native")}
    with LocalRunner(2, environment=environment, trial_function="exchanging:run_trial") as runner:
        yield runner


def request_for(attempt: str, **changes: Any) -> TrialRequest:
    fields: dict[str, Any] = {
        "attempt": attempt, "model": SPEC, "config": TrialConfig(), "world_size": 2,
        "workload": Workload(global_batch_size=8, sequence_length=64),
        "fidelity": Fidelity(min_steps=1, max_steps=1, max_warmup_steps=3),
    }  # fmt: skip
    return TrialRequest(**{**fields, **changes})


@pytest.mark.prove
def test_collectives_inside_a_block_run_once_and_kept_results_are_right(pair: LocalRunner, tmp_path: Path) -> None:
    result = pair.run(request_for("exchange", engine=f"exchange@{tmp_path}"))
    assert result.outcome is Outcome.OK, result.traceback or result.message
    per_rank = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for found in per_rank:
        for kind in ("selective", "full"):
            assert all(torch.equal(a, b) for a, b in zip(found["found"][kind], found["found"]["none"], strict=True))
        once = ["all_reduce", "all_gather"]
        assert found["counts"] == {"none": once, "selective": once, "full": 2 * once}
        assert "keep_collective" in found["refused"]


@pytest.mark.nightly
def test_stage_3_gathers_outside_of_what_runs_again(pair: LocalRunner) -> None:
    """Two real ranks: the same losses to the bit, the same collectives, and peaks in order."""
    results: list[TrialResult] = []
    for kind, every in (("none", 1), ("selective", 1), ("full", 2), ("full", 1)):
        knobs = {"zero_stage": 3, "param_persistence_threshold": 0, "precision": "fp64", "micro_batch_size": 4}
        config = TrialConfig().replace({**knobs, "activation_checkpointing": kind, "checkpoint_every_k": every})
        results.append(pair.run(request_for(f"{kind}{every}", config=config)))
    assert all(result.outcome is Outcome.OK for result in results), [result.traceback or result.message for result in results]
    assert len({result.losses for result in results}) == 1
    assert len({result.ranks[0].collectives for result in results}) == 1
    peaks = [result.ranks[0].tag_peak_bytes["activations"] for result in results]
    assert peaks[3] < peaks[2] < peaks[0]
    assert peaks[3] < peaks[1] < peaks[0]
