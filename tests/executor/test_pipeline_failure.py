"""A rank that fails in step 2 of a pipeline ends all ranks in seconds with its own traceback, and the gang goes on."""

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
    name="tiny", family="llama", num_layers=8, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    ffn_hidden_size=24, vocab_size=64, sequence_length=16,
)  # fmt: skip
LAYOUTS = {
    "pp4 1f1b": {"pipeline_parallel_size": 4},
    "pp4 zbv": {"pipeline_parallel_size": 4, "virtual_stages": 2, "pipeline_schedule": "zbv"},
    "pp2 dp2": {"pipeline_parallel_size": 2, "zero_stage": 2},
}
Try = Callable[..., TrialResult]


@pytest.fixture(scope="module")
def attempt(forked_ranks: None) -> Iterator[Try]:
    """Runs a trial on ranks that are started anew where the last one failed; a failed one must leave none, and soon."""
    numbers, others = itertools.count(), children()
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    with LocalRunner(RANKS, environment=environment, trial_function="failing:run_trial") as runner:

        def run(layout: str, engine: str = "native") -> TrialResult:
            knobs: dict[str, Any] = LAYOUTS[layout]
            request = TrialRequest(
                attempt=f"attempt-{next(numbers)}",
                model=SPEC,
                config=TrialConfig(micro_batch_size=1).replace(knobs),
                workload=Workload(global_batch_size=8, sequence_length=16),
                world_size=RANKS,
                engine=engine,
                fidelity=Fidelity(min_steps=1, max_steps=1, max_warmup_steps=3, measure_memory=False),
                timeout_seconds=120,
            )
            result = runner.run(request)
            if result.outcome is not Outcome.OK:
                assert children() <= others
            return result

        yield run


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.prove
def test_a_death_ends_every_rank_and_the_next_trial_runs(attempt: Try) -> None:
    """First in this file, since the ranks of that next trial are there for the test after it."""
    dead = attempt("pp4 1f1b", "kill@1")
    assert (dead.outcome, dead.message) == (Outcome.LOST, "rank 1 was killed by SIGKILL before the trial ended")
    assert attempt("pp4 1f1b").outcome is Outcome.OK


@pytest.mark.prove
@pytest.mark.parametrize(("layout", "failing"), sampled([("pp4 zbv", "backward@2"), ("pp2 dp2", "forward@3")], every=2))
def test_an_error_ends_every_rank_with_its_own_traceback(attempt: Try, layout: str, failing: str) -> None:
    failed = attempt(layout, failing)
    assert (failed.outcome, failed.message) == (Outcome.FAILED, f"rank {failing[-1]}: ValueError: this layer has enough")
    assert failed.traceback is not None
    assert "in in_forward" in failed.traceback
    assert "/gloo/" not in failed.traceback
