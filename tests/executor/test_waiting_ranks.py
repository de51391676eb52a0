"""What ranks compute and what they wait, with one of them slow. Naps are far longer than anything else that a step does."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.measurement.timing import slow_nodes
from executor.runners.local import LocalRunner
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig
from tests.executor.slowed import NAP_SECONDS
from tests.sampling import sampled

FOLDER = str(Path(__file__).parent)
"""Ranks get it by PYTHONPATH, for `slowed`."""

SPEC = ModelSpec(
    name="waited", family="llama", num_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=64, vocab_size=64, sequence_length=32,
)  # fmt: skip
TRIES = 4
BRIEF = Fidelity(min_steps=3, max_steps=3, max_warmup_steps=3, measure_memory=False)


@pytest.fixture(scope="module")
def runner(forked_ranks: None) -> Iterator[LocalRunner]:
    with LocalRunner(2, device="cpu", environment={"PYTHONPATH": FOLDER}, trial_function="slowed:run_trial") as runner:
        yield runner


def measured(runner: LocalRunner, config: TrialConfig, engine: str = "native") -> TrialResult:
    request = TrialRequest(
        attempt="a", model=SPEC, config=config, engine=engine, world_size=2, fidelity=BRIEF,
        workload=Workload(global_batch_size=4, sequence_length=8),
    )  # fmt: skip
    result = runner.run(request)
    assert result.outcome is Outcome.OK, result.traceback or result.message
    return result


@pytest.mark.prove
@pytest.mark.parametrize(
    "config",
    [
        TrialConfig(zero_stage=0),
        TrialConfig(zero_stage=3),
        TrialConfig(tensor_parallel_size=2),
        TrialConfig(pipeline_parallel_size=2, pipeline_schedule="1f1b"),
        TrialConfig(pipeline_parallel_size=2, pipeline_schedule="interleaved_1f1b", virtual_stages=2),
    ],
    ids=["zero-0", "zero-3", "tensor", "1f1b", "interleaved"],
)
def test_the_slow_rank_computes_and_the_other_waits_for_it(runner: LocalRunner, config: TrialConfig) -> None:
    for _ in range(TRIES):
        result = measured(runner, config)
        quick, slow = result.ranks
        if slow.compute_seconds_per_step - quick.compute_seconds_per_step > NAP_SECONDS / 2:  # type: ignore[operator]
            break  # else a neighbour's load slowed the quick one
    for rank in (quick, slow):
        assert rank.compute_seconds_per_step is not None
        assert rank.wait_seconds_per_step is not None
        whole = rank.compute_seconds_per_step + rank.wait_seconds_per_step
        assert whole <= max(result.step_seconds)
        assert rank.compute_relative_error is not None
    assert slow.compute_seconds_per_step > NAP_SECONDS  # type: ignore[operator]
    assert slow.compute_seconds_per_step > quick.compute_seconds_per_step + NAP_SECONDS / 2  # type: ignore[operator]
    assert quick.wait_seconds_per_step > NAP_SECONDS / 2  # type: ignore[operator]
    # On one machine there is nobody to blame; were they two, the slow one would be.
    assert slow_nodes(config, result.ranks, 0.04) == []
    if config.pipeline_parallel_size == 1:
        # What a busy machine adds to a rank's spread is not looked at here.
        apart = [dataclasses.replace(rank, node=str(rank.rank), compute_relative_error=0.02) for rank in result.ranks]
        assert [event.node for event in slow_nodes(config, apart, 0.04)] == ["1"]


@pytest.mark.prove
@pytest.mark.parametrize("engine", sampled(["ddp", "fsdp2"], every=2))
def test_engines_that_wait_inside_of_torch_say_that_they_cannot_tell(runner: LocalRunner, engine: str) -> None:
    result = measured(runner, TrialConfig(zero_stage=0 if engine == "ddp" else 3), engine)
    assert {rank.compute_seconds_per_step for rank in result.ranks} == {None}
    assert {rank.wait_seconds_per_step for rank in result.ranks} == {None}
