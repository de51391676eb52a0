"""Dry runs against four real ranks: peaks within 1 %, FLOPs, collectives and host memory equal."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.correctness.parity_cases import make_model
from executor.dry.dry_run import dry_run_places
from executor.runners.local import LocalRunner
from search_spaces.mesh import PIPELINE, make_mesh
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

RANKS = 4
BOUND = 0.01
SPEC = ModelSpec(
    name="dry", family="llama", num_layers=4, hidden_size=32, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
    ffn_hidden_size=48, vocab_size=64, sequence_length=32,
)  # fmt: skip
EXPERTS = dataclasses.replace(SPEC, num_layers=2, num_experts=4, experts_per_token=2)
QUICK = Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2)
GATHERS = {"zero_stage": 3, "param_persistence_threshold": 0, "prefetch_bucket_size": 0}
PIPELINED = {"pipeline_parallel_size": 2}
VIRTUAL: dict[str, Any] = {**PIPELINED, "virtual_stages": 2}
# More of them, all schedules among them, are in benchmarks/prediction/dry_run.py.
CASES: dict[str, dict[str, Any]] = {
    "stage 0, many micro-batches": {"micro_batch_size": 1},
    "stage 1, bf16": {"zero_stage": 1, "precision": "bf16", "micro_batch_size": 4},
    "stage 2, many micro-batches in buckets": {"zero_stage": 2, "reduce_bucket_size": 3000, "allgather_bucket_size": 3000},
    "stage 3, full checkpointing": {**GATHERS, "micro_batch_size": 4, "activation_checkpointing": "full"},
    "offload": {**GATHERS, "offload_optimizer": "cpu", "offload_param": "cpu", "offload_ratio": 0.5, "micro_batch_size": 4},
    "tensor, sequence, chunks": {
        "tensor_parallel_size": 2, "sequence_parallel": True, "loss_chunk_size": 128, "micro_batch_size": 8
    },
    "context": {"context_parallel_size": 2, "zero_stage": 2, "micro_batch_size": 8},
    "1f1b": {**PIPELINED, "zero_stage": 1, "micro_batch_size": 2},
    "modules recomputed": {"recompute_modules": "norms+activations+attention", "precision": "bf16", "micro_batch_size": 4},
    "modules recomputed, tensor, stage 3": {
        **GATHERS, "recompute_modules": "norms+activations", "tensor_parallel_size": 2, "micro_batch_size": 8,
    },
    "zbv": {**VIRTUAL, "pipeline_schedule": "zbv", "micro_batch_size": 2},
}  # fmt: skip


PREDICTING: dict[str, dict[str, Any]] = {
    "stage 3": {**GATHERS, "mtp_layers": 2, "micro_batch_size": 4},
    "pipeline": {**PIPELINED, "mtp_layers": 1, "micro_batch_size": 2, "loss_chunk_size": 20},
    "context, tensor": {"tensor_parallel_size": 2, "context_parallel_size": 2, "mtp_layers": 1, "micro_batch_size": 4},
}


@pytest.fixture(scope="module")
def ranks(forked_ranks: None) -> Iterator[LocalRunner]:
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    with LocalRunner(RANKS, device="cpu", environment=environment, trial_function="counting:run_trial") as runner:
        yield runner


@pytest.mark.prove
@pytest.mark.parametrize("case", sampled(CASES, every=8))
def test_a_dry_run_foretells_what_real_ranks_measure(ranks: LocalRunner, case: str) -> None:
    config, workload = TrialConfig().replace(CASES[case]), Workload(global_batch_size=16, sequence_length=32)
    spec = dataclasses.replace(SPEC, num_layers=4 if config.virtual_stages > 1 else 2)
    require_foretold(ranks, spec, config, workload, exact_memory=True)


@pytest.mark.prove
@pytest.mark.parametrize("case", sampled(PREDICTING, every=6))
def test_multi_token_prediction_is_foretold(ranks: LocalRunner, case: str) -> None:
    config, workload = TrialConfig().replace(PREDICTING[case]), Workload(global_batch_size=16, sequence_length=32)
    require_foretold(ranks, dataclasses.replace(SPEC, num_layers=2), config, workload, exact_memory=True)


@pytest.mark.prove
@pytest.mark.parametrize(
    "knobs",
    sampled([{"zero_stage": 1}, {**GATHERS, "context_parallel_size": 2, "context_parallel_method": "ulysses"}], every=2),
)
@pytest.mark.parametrize("family", sampled(["gemma", "olmo", "granite"], every=3))
def test_families_are_foretold(ranks: LocalRunner, family: str, knobs: dict[str, Any]) -> None:
    model = make_model(family, 2)
    assert isinstance(model, ModelSpec)
    config, workload = (
        TrialConfig().replace({**knobs, "micro_batch_size": 4}),
        Workload(global_batch_size=16, sequence_length=16),
    )
    require_foretold(ranks, model, config, workload, exact_memory=True)


@pytest.mark.nightly
def test_experts_are_foretold_as_evenly_used(ranks: LocalRunner) -> None:
    config, workload = TrialConfig(micro_batch_size=4), Workload(global_batch_size=16, sequence_length=32)
    require_foretold(ranks, EXPERTS, config, workload, exact_memory=False)


@pytest.mark.prove
@pytest.mark.parametrize("stage", sampled([1, 3], every=2))
def test_experts_with_a_capacity_are_foretold_exactly_whatever_ranks_divide_them(ranks: LocalRunner, stage: int) -> None:
    spec = dataclasses.replace(EXPERTS, capacity_factor=1.25, load_balance=0.01)
    config = TrialConfig(micro_batch_size=4, expert_parallel_size=2, zero_stage=stage).replace({} if stage < 3 else GATHERS)
    require_foretold(ranks, spec, config, Workload(global_batch_size=16, sequence_length=32), exact_memory=True)


@pytest.mark.prove
@pytest.mark.parametrize(
    "knobs",
    sampled(
        [
            {**GATHERS, "sequence_parallel": True, "expert_parallel_size": 4},
            {"zero_stage": 1, "expert_parallel_size": 2, "activation_checkpointing": "full"},
            {"zero_stage": 2, "context_parallel_size": 2, "expert_parallel_size": 4, "micro_batch_size": 8},
        ],
        every=3,
    ),
)
def test_whole_experts_beside_tensor_ranks_are_foretold(ranks: LocalRunner, knobs: dict[str, Any]) -> None:
    """Every token goes to every expert, so that all have equally many."""
    spec = dataclasses.replace(EXPERTS, experts_per_token=4, shared_expert_size=16)
    whole = {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 1, "micro_batch_size": 4}
    config = TrialConfig().replace({**whole, **knobs})
    require_foretold(ranks, spec, config, Workload(global_batch_size=16, sequence_length=32), exact_memory=True)


def require_foretold(runner: LocalRunner, spec: ModelSpec, config: TrialConfig, workload: Workload, exact_memory: bool) -> None:
    request = TrialRequest(
        attempt=config.hash, model=spec, config=config, workload=workload, world_size=RANKS, fidelity=QUICK, timeout_seconds=60
    )
    measured = runner.run(request)
    assert measured.outcome is Outcome.OK, measured.traceback or measured.message
    flops = [int(count) for count in measured.environment["flops"].split()]
    mesh = make_mesh(config, RANKS)
    foretold = {rank.coordinates[PIPELINE]: rank for rank in dry_run_places(spec, config, workload, RANKS).ranks}
    for real in measured.ranks:
        dry = foretold[mesh.coordinates(real.rank)[PIPELINE]]
        assert dry.flops_per_step == flops[real.rank]
        assert dry.collectives == real.collectives
        assert dry.host_memory_bytes == real.host_memory_bytes
        assert sum(dry.memory_by_tag.values()) == dry.peak_memory_bytes
        bound = BOUND if exact_memory else 0.1
        assert abs(dry.peak_memory_bytes / real.peak_memory_bytes - 1) <= bound, (dry, real)
