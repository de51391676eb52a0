"""Blocks as graphs: the same training from static buffers, and breaches of the contract of CUDA graphs are found.

No CUDA device is here: a stand-in (`benchmarks.common.static_buffers`) keeps the contract, and raises where a graph would be
wrong."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from benchmarks.common.gang import Gang
from benchmarks.common.static_buffers import ContractBreachError, StaticBuffers
from benchmarks.correctness import parity_rank
from benchmarks.correctness.parity_cases import WIDE, Case
from benchmarks.correctness.parity_rank import compare
from executor.dry.dry_run import dry_run
from executor.engine import PrivatePool, RankContext
from executor.engines import session as sessions
from executor.engines.native.buckets import GradientReducer
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession
from executor.errors import EngineRefusalError
from executor.measurement.memory import account_step
from executor.parallel.graphs import EAGER_STEPS, BlockGraphs, Call
from executor.trial.run import ENGINES, run_trial
from search_spaces.knob import Value
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.nightly  # `make oldest` runs them too

SPEC = ModelSpec(
    name="small", family="llama", num_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    ffn_hidden_size=24, vocab_size=32, sequence_length=16,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=8, sequence_length=16, learning_rate=1e-2)
ALONE = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
ENGINE = NativeEngine(StaticBuffers)
GRAPHED: dict[str, Value] = {"precision": "fp64", "micro_batch_size": 2, "cuda_graphs": True}


class Kept(StaticBuffers):
    """Keeps the results of the capture with their autograd graphs, as torch does."""

    results: list[Tensor]

    def graph(self, calls: Sequence[nn.Module], samples: Sequence[Tensor]) -> Sequence[Call]:
        self.results = [call(sample) for call, sample in zip(calls, samples, strict=True)]
        assert all(result.grad_fn is not None for result in self.results)
        return [partial(nn.Module.__call__, call) for call in calls]


def test_the_graph_of_the_capture_is_forgotten() -> None:
    """It would keep nodes of the parameters on the capture's stream, on which later gradients would then come."""
    blocks, capture = [nn.Linear(4, 4), nn.Linear(4, 4)], Kept()
    graphs = BlockGraphs(blocks, capture)
    blocks[1](blocks[0](torch.ones(2, 4, requires_grad=True)))
    graphs.capture()
    assert [result.grad_fn for result in capture.results] == [None, None]


def graphed_parity(rank: int, task: tuple[Case, bool]) -> tuple[float, int]:
    """How far a graphed case is off plain PyTorch, and its replays; a task is a case, and whether kept gradients are copied."""
    case, owns = task
    replays = 0
    replay = StaticBuffers.graph

    def counted(self: StaticBuffers, *arguments: Any) -> Any:
        def call(graph: Any, x: Tensor) -> Any:
            nonlocal replays
            replays += 1
            return graph(x)

        return [partial(call, graph) for graph in replay(self, *arguments)]

    engines = {**parity_rank.ENGINES, "native": lambda: ENGINE}
    with (
        patch.object(parity_rank, "ENGINES", engines),
        patch.object(sessions, "EAGER_STEPS", 1),  # two of the three steps that are compared replay
        patch.object(StaticBuffers, "graph", counted),
        patch.object(GradientReducer, "take", take_what_is_there)
        if not owns
        else patch.object(parity_rank, "ENGINES", engines),
    ):
        return compare(rank, case).off, replays


_take = GradientReducer.take


def take_what_is_there(self: GradientReducer, slot: Any) -> None:
    """As without graphs, where each gradient has memory of its own."""
    self.overwritten = False
    _take(self, slot)


def case(ranks: int, model: str = "llama", **knobs: Value) -> Case:
    config = TrialConfig().replace({**GRAPHED, "reduce_bucket_size": 500, "allgather_bucket_size": 500, **knobs})
    return Case(engine="native", ranks=ranks, model=model, config=config)


@pytest.fixture(scope="module")
def alone() -> Iterator[Gang]:
    with Gang(1, graphed_parity) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pair(forked_ranks: None) -> Iterator[Gang]:
    with Gang(2, graphed_parity) as ranks:
        yield ranks


def check(gang: Gang, tried: Case) -> None:
    for off, replays in gang.run((tried, True)):
        assert off <= tried.bound
        micro_batches = tried.config.gradient_accumulation_steps(16, tried.ranks)
        assert replays == 2 * 3 * micro_batches, "two steps of three layers"


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        ("llama", {"zero_stage": 0, "micro_batch_size": 4}),
        ("llama", {"zero_stage": 1, "overlap_param_gather": True, "contiguous_gradients": False}),
        ("llama", {"zero_stage": 1, "offload_optimizer": "cpu", "offload_ratio": 0.5, "micro_batch_size": 8}),
        ("llama", {"zero_stage": 2, "defer_gradient_reduction": True, "contiguous_gradients": False}),
        ("llama", {"zero_stage": 1, "precision": "fp16", "optimizer": "muon", "micro_batch_size": 4}),
        ("llama", {"zero_stage": 0, "precision": "bf16", "accumulation_dtype": "bf16", "contiguous_gradients": False}),
        ("gpt2", {"zero_stage": 2}),
        (WIDE, {"zero_stage": 1, "lora_rank": 4, "frozen_dtype": "nf4", "micro_batch_size": 8}),
        ("llama", {"zero_stage": 1, "prompt_length": 4, "micro_batch_size": 8}),
        ("llama", {"zero_stage": 2, "prefix_length": 4, "micro_batch_size": 8}),
    ],
    ids=str,
)
def test_two_ranks_train_as_plain_torch_does(pair: Gang, model: str, knobs: dict[str, Value]) -> None:
    check(pair, case(2, model, **knobs))


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_trains_as_plain_torch_does(alone: Gang, stage: int) -> None:
    check(alone, case(1, zero_stage=stage, micro_batch_size=8))


def test_gradients_that_wait_are_copied_out_of_buffers_that_the_next_micro_batch_overwrites(alone: Gang) -> None:
    """pytorch/pytorch issue 181723: autograd takes static gradients over as `parameter.grad`."""
    tried = case(1, zero_stage=0, contiguous_gradients=False, micro_batch_size=8)
    ((off, _),) = alone.run((tried, False))
    assert off > 1e-6, "torch copies static gradients itself now: let `GradientReducer.overwritten` go"
    check(alone, tried)


def built(**knobs: Value) -> ParallelSession:
    return ENGINE.build(ALONE, SPEC, TrialConfig().replace({**GRAPHED, **knobs}), WORKLOAD)


def step(session: ParallelSession, number: int) -> float | None:
    session.prepare(number)
    return session.train_step().loss


@pytest.fixture(scope="module")
def captured() -> Iterator[ParallelSession]:
    session = built()
    for number in range(EAGER_STEPS + 1):
        step(session, number)
    yield session
    session.close()


def test_blocks_are_captured_between_steps_once_the_eager_ones_are_over() -> None:
    session = built()
    for number in range(EAGER_STEPS):
        step(session, number)
    assert session.private_pool() is None
    assert session.capture_seconds() == 0.0
    session.prepare(EAGER_STEPS)
    spent = session.capture_seconds()
    assert spent > 0.0
    session.train_step()
    step(session, EAGER_STEPS + 1)
    assert session.capture_seconds() == spent
    session.close()
    session.close()


def test_an_evaluation_runs_eagerly_and_sees_what_was_trained(captured: ParallelSession) -> None:
    eager = ENGINE.build(ALONE, SPEC, TrialConfig().replace({**GRAPHED, "cuda_graphs": False}), WORKLOAD)
    for number in range(EAGER_STEPS + 1):
        step(eager, number)
    losses = []
    for session in (captured, eager):
        session.prepare(9, 1)
        with torch.no_grad():
            losses.append(float(session.replicas[0].module(**{k: v[:1] for k, v in session._batches[0].items()})))
    assert losses[0] == losses[1]
    eager.close()


def test_another_shape_is_refused_by_name(captured: ParallelSession) -> None:
    (batch, *_) = captured._batches
    with pytest.raises(RuntimeError, match=r"block 0 was captured for another input .* cuda_graphs=false"):
        captured.replicas[0].module(**{name: value[:1] for name, value in batch.items()})


@pytest.fixture
def graphs() -> BlockGraphs:
    """Of two plain blocks, which are captured."""
    found = BlockGraphs([nn.Linear(4, 4) for _ in range(2)], StaticBuffers())
    run(found)
    found.capture()
    run(found)
    return found


def run(graphs: BlockGraphs, backward: bool = True, order: int = 1) -> Tensor:
    x = torch.ones(2, 4, requires_grad=True)
    for block in graphs.blocks[::order]:
        x = block(x)
    if backward:
        x.sum().backward()
    return x


def test_a_parameter_that_moved_is_found(graphs: BlockGraphs) -> None:
    moved = next(graphs.blocks[1].parameters())
    moved.data = moved.data.clone()
    with pytest.raises(ContractBreachError, match="moved"):
        run(graphs)


def test_a_parameter_that_is_frozen_is_found(graphs: BlockGraphs) -> None:
    next(graphs.blocks[1].parameters()).requires_grad_(False)
    with pytest.raises(ContractBreachError, match="requires_grad"):
        run(graphs)


def test_a_second_micro_batch_in_flight_is_found(graphs: BlockGraphs) -> None:
    first = run(graphs, backward=False)
    with pytest.raises(ContractBreachError, match="still needs"):
        run(graphs)
    first.sum().backward()
    run(graphs)


def test_blocks_in_another_order_are_found(graphs: BlockGraphs) -> None:
    with pytest.raises(ContractBreachError, match="order"):
        run(graphs, order=-1)


def test_results_and_gradients_are_overwritten_by_the_next_replay(graphs: BlockGraphs) -> None:
    weight, found = graphs.blocks[0].weight, set()
    for _ in range(2):
        weight.grad = None
        result = run(graphs)
        assert isinstance(weight.grad, Tensor)
        found.add((result.data_ptr(), weight.grad.data_ptr()))
    assert len(found) == 1


def test_what_asks_for_a_value_cannot_be_captured() -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.detach().sum() > 0)

    graphs = BlockGraphs([block := Asks(4, 4)], StaticBuffers())
    block(torch.ones(2, 4, requires_grad=True)).sum().backward()
    with pytest.raises(RuntimeError, match="trac"):
        graphs.capture()


def test_what_the_host_computes_stays_as_it_was_captured() -> None:
    class Counts(nn.Linear):
        calls = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    graphs = BlockGraphs([block := Counts(4, 4)], StaticBuffers())
    x = torch.ones(2, 4, requires_grad=True)
    block(x).sum().backward()
    graphs.capture()
    replays = []
    for _ in range(2):
        result = block(x)
        replays.append(result.detach().clone())
        result.sum().backward()
    assert torch.equal(*replays)


def test_graphs_are_accounted_for_by_tag_and_closed_form(captured: ParallelSession) -> None:
    pool = captured.private_pool()
    assert pool is not None
    width = 8  # bytes of fp64
    layer = sum(value.numel() for value in captured.parts[0].blocks[0].parameters())
    message = 2 * 16 * 16  # samples, tokens, hidden
    assert pool.by_tag["gradients"] == SPEC.num_layers * layer * width
    # Of each block: its input, its output, and the gradients of both.
    assert pool.by_tag["activations"] == SPEC.num_layers * 4 * message * width
    account = account_step(captured.train_step, captured.tagged_storages, ALONE.device, pool)
    without = account_step(captured.train_step, captured.tagged_storages, ALONE.device)
    assert account.peak - without.peak == sum(pool.by_tag.values())
    assert sum(account.by_tag.values()) == account.peak
    assert all(account.at_start[tag] - without.at_start[tag] == pool.by_tag.get(tag, 0) for tag in account.at_start)


def trial(graphs: bool) -> Any:
    request = TrialRequest(
        attempt="one", model=SPEC, config=TrialConfig().replace({**GRAPHED, "cuda_graphs": graphs}), world_size=1,
        workload=WORKLOAD, fidelity=Fidelity(min_steps=1, max_steps=1, max_warmup_steps=3),
    )  # fmt: skip
    with patch.dict(ENGINES, native=ENGINE):
        return run_trial(ALONE, request, lambda _: None)


def test_a_trial_tells_the_seconds_of_the_capture_apart_and_counts_the_same_work() -> None:
    graphed, plain = trial(graphs=True), trial(graphs=False)
    assert graphed.outcome == plain.outcome == Outcome.OK
    assert graphed.losses == pytest.approx(plain.losses, rel=1e-12)
    assert graphed.phase_seconds["capture"] > 0.0
    assert "capture" not in plain.phase_seconds
    flops = [result.hardware_tflops_per_device * result.step_seconds[0] for result in (graphed, plain)]
    assert flops[0] == pytest.approx(flops[1])
    assert graphed.ranks[0].memory_by_tag["gradients"] > plain.ranks[0].memory_by_tag["gradients"]


@pytest.mark.parametrize(
    ("rule", "model", "knobs"),
    [
        ("graphs-model", dataclasses.replace(SPEC, num_experts=4, experts_per_token=1), {}),
        ("graphs-model", dataclasses.replace(SPEC, sliding_window=8), {}),
        ("graphs-model", SPEC, {"attention_window": 8}),
        ("graphs-model", FactoryModel(reference="m:f", parameter_count=10), {}),
        ("graphs-stage-3", SPEC, {"zero_stage": 3}),
    ],
)  # fmt: skip
def test_what_cannot_be_captured_is_refused_before_it_is_built(rule: str, model: Any, knobs: dict[str, Value]) -> None:
    with pytest.raises(EngineRefusalError) as refused:
        ENGINE.build(ALONE, model, TrialConfig().replace({**GRAPHED, **knobs}), WORKLOAD)
    assert refused.value.rule == rule


def test_a_device_without_graphs_is_refused() -> None:
    with pytest.raises(EngineRefusalError, match="only on CUDA devices") as refused:
        NativeEngine().build(ALONE, SPEC, TrialConfig().replace(GRAPHED), WORKLOAD)
    assert refused.value.rule == "graphs-device"


def test_memory_that_the_allocator_counts_is_not_counted_twice() -> None:
    pool = PrivatePool(by_tag={"activations": 100, "gradients": 20}, allocated=30)
    account = account_step(lambda: None, list, ALONE.device, pool)
    assert (account.peak, account.by_tag["activations"], account.by_tag["gradients"]) == (120, 100, 20)


def test_a_dry_run_captures_nothing() -> None:
    with pytest.raises(EngineRefusalError, match="autotune predict") as refused:
        dry_run(SPEC, TrialConfig().replace(GRAPHED), WORKLOAD, 1)
    assert refused.value.rule == "dry-run-graphs"
