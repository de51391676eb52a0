"""A rank that is out of memory while others wait for it: the trial is INFEASIBLE, and the same processes run the next one."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor.runners.local import LocalRunner
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

RANKS = 4
SPEC = ModelSpec(
    name="tiny", family="llama", num_layers=4, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    ffn_hidden_size=24, vocab_size=64, sequence_length=16,
)  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline and data": {"pipeline_parallel_size": 2, "zero_stage": 2},
    "data": {"zero_stage": 3},
    "tensor and data": {"tensor_parallel_size": 2, "zero_stage": 2},
}
Try = Callable[..., TrialResult]


@pytest.fixture(scope="module")
def attempt(forked_ranks: None) -> Iterator[Try]:
    numbers = itertools.count()
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalRunner(RANKS, environment=environment, trial_function="failing:run_trial") as runner,
    ):
        # On a busy machine the ranks that fail for another may tell it later than it is worth waiting for elsewhere.
        patch.setattr("executor.runners.verdict.CLEAN_GRACE_SECONDS", 60.0)
        patch.setattr("executor.runners.gang.REJOIN_SECONDS", 120.0)

        def run(layout: str, engine: str = "native") -> TrialResult:
            return runner.run(
                TrialRequest(
                    attempt=f"attempt-{next(numbers)}",
                    model=SPEC,
                    config=TrialConfig(micro_batch_size=1).replace(LAYOUTS[layout]),
                    workload=Workload(global_batch_size=8, sequence_length=16),
                    world_size=RANKS,
                    engine=engine,
                    fidelity=Fidelity(min_steps=1, max_steps=1, max_warmup_steps=3, measure_memory=False),
                    timeout_seconds=120,
                )
            )

        yield run


def children() -> set[int]:
    """The ranks, and the process that they are forked from."""
    return {process.pid for process in psutil.Process().children()}


@pytest.mark.parametrize("layout", sampled(LAYOUTS, every=4))
def test_the_same_processes_run_the_next_trial(attempt: Try, layout: str) -> None:
    before = attempt(layout)
    processes = children()
    failed = attempt(layout, "oom@1")
    assert (failed.outcome, failed.cause) == (Outcome.INFEASIBLE, "device-memory")
    assert failed.message == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free"
    after = attempt(layout)
    assert (after.outcome, after.losses, after.warm) == (Outcome.OK, before.losses, True)
    assert children() == processes


@pytest.mark.prove
def test_a_rank_that_cannot_leave_its_groups_tells_its_failure_first(attempt: Try, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never get to tell it after that: the trial would end by its time limit."""
    monkeypatch.setattr("executor.runners.verdict.CLEAN_GRACE_SECONDS", 0.0)
    assert attempt("pipeline and data", "stuck@1").outcome is Outcome.INFEASIBLE
