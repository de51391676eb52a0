"""Dynamic loss scaling: the scale as torch's, an overflow on one rank seen by all, and what a trial makes of it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.gang import Gang
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import LossScaler, ParallelSession
from executor.errors import WrongResultError
from executor.trial.run import run_trial
from search_spaces.models.model import ModelSpec
from search_spaces.optimizers import GROWTH_INTERVAL
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

SPEC = ModelSpec(
    name="scaled", family="llama", num_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=4, head_dim=4,
    ffn_hidden_size=24, vocab_size=64, sequence_length=16,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=8, sequence_length=16, learning_rate=1e-2, gradient_clipping=1.0)
ALONE = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
FP16: dict[str, Any] = {"precision": "fp16", "micro_batch_size": 2, "param_persistence_threshold": 0}
LAYOUTS: list[dict[str, Any]] = [
    {"zero_stage": 0},
    {"zero_stage": 1, "pipeline_parallel_size": 2},
    {"zero_stage": 2, "context_parallel_size": 2, "reduce_dtype": "fp16", "accumulation_dtype": "fp16", "micro_batch_size": 1},
    {"zero_stage": 3, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"zero_stage": 3, "hsdp_shard_size": 2, "offload_optimizer": "cpu", "offload_param": "cpu"},
]


@pytest.mark.nightly
def test_the_scale_moves_as_that_of_torch() -> None:
    ours, theirs = LossScaler(), torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    overflows = {0, 1, 5, 6 + GROWTH_INTERVAL - 1, 7 + 2 * GROWTH_INTERVAL, 9 + 3 * GROWTH_INTERVAL}
    met = set()
    for step in range(3 * GROWTH_INTERVAL + 20):
        parameter.grad = torch.full((1,), float("inf") if step in overflows else 1.0)
        theirs.scale(torch.ones(()))
        assert ours.accepts(parameter.grad.norm()) is (step not in overflows)
        theirs.step(optimizer)
        theirs.update()
        assert ours.scale == theirs.get_scale(), step
        met.add(ours.scale)
    assert len(met) > 3


def test_no_scale_helps_where_gradients_are_not_finite_at_the_least() -> None:
    scaler = LossScaler()
    with pytest.raises(WrongResultError, match="loss scale of 1, below which no scale helps; use precision=bf16"):
        while not scaler.accepts(torch.tensor(float("nan"))):
            pass


def _overflow_once(session: ParallelSession) -> None:
    """Make one gradient of this rank infinite, the first time that it is made."""
    part = session.replicas[-1].module
    parameter = next(value for value in part.parameters() if value.requires_grad)
    made = []

    def spoil(gradient: Tensor) -> Tensor | None:
        made.append(True)
        return torch.full_like(gradient, float("inf")) if len(made) == 1 else None

    parameter.register_hook(spoil)  # type: ignore[no-untyped-call]


def overflow_on_one(rank: int, knobs: dict[str, Any]) -> tuple[list[bool], bool, float, float]:
    """Whether runs were skipped; whether a skipped one left the weights; the scale after; what the overflow changed at last."""
    context = RankContext(rank=rank, world_size=4, device=torch.device("cpu"))
    weights, skipped, left, scale = [], [False, False], False, 0.0
    for spoils in (False, True):
        session = NativeEngine().build(context, SPEC, TrialConfig().replace({**FP16, **knobs}), WORKLOAD)
        if spoils and rank == 2:
            _overflow_once(session)
        for step in range(3):
            session.prepare(step)
            before = session.full_parameters()
            if session.train_step().skipped:
                skipped[step] = True
                left = all(torch.equal(value, before[name]) for name, value in session.full_parameters().items())
                skipped.append(session.train_step().skipped)
        weights.append(session.full_parameters())
        scale = session.scaler.scale if session.scaler is not None else 0.0
        session.close()
    dist.barrier()
    off = max(float((value - weights[0][name]).abs().max()) for name, value in weights[1].items())
    return skipped, left, scale, off


@pytest.fixture(scope="module")
def gang() -> Any:
    with Gang(4, overflow_on_one) as ranks:
        yield ranks


@pytest.mark.parametrize("knobs", sampled(LAYOUTS, every=3), ids=str)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_leaves_no_trace(gang: Gang, knobs: dict[str, Any]) -> None:
    for skipped, left, scale, off in gang.run(knobs):
        assert skipped == [True, False, False]
        assert left
        assert scale == 2.0**15
        assert off < 2e-4  # numbers near fp16's least round otherwise under half the scale


def _trial(config: TrialConfig, reference: tuple[float, ...] = ()) -> Any:
    request = TrialRequest(
        attempt="one", model=SPEC, config=config, workload=WORKLOAD, world_size=1, reference_losses=reference,
        fidelity=Fidelity(min_steps=2, max_steps=2, max_warmup_steps=4, measure_memory=False), timeout_seconds=60,
    )  # fmt: skip
    return run_trial(ALONE, request, lambda _: None)


@pytest.mark.prove
def test_a_trial_whose_first_steps_overflow_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held against the reference as any other: the step that overflowed is trained again on the same data."""
    exact = _trial(TrialConfig(micro_batch_size=2))
    monkeypatch.setattr("executor.engines.session.INITIAL_SCALE_POWER", 22)
    result = _trial(TrialConfig(precision="fp16", micro_batch_size=2), exact.losses)
    assert result.outcome is Outcome.OK
    assert result.losses == pytest.approx(exact.losses, rel=2.0**-11)
    assert result.gradient_norms == pytest.approx(exact.gradient_norms, rel=2e-2)
    assert result.hardware_tflops_per_device == pytest.approx(
        exact.hardware_tflops_per_device * _mean(exact.step_seconds) / _mean(result.step_seconds), rel=1e-6
    )


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def test_the_norm_that_is_told_is_the_gradients_own() -> None:
    session = NativeEngine().build(ALONE, SPEC, TrialConfig(precision="fp16", micro_batch_size=8), WORKLOAD)
    session.prepare(0)
    report = session.train_step()
    session.close()
    assert report.gradient_norm is not None
    assert report.gradient_norm < 100  # of the gradient itself, not of what the scale made of it
