"""The dry runner: the contract, and what a trial of it tells."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from runner_contract import ENVIRONMENT, TRIAL_FUNCTION, RunnerContract, request_for

from executor.runners.one_process import DryRunner
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.usefixtures("forked_ranks")

ASKS = """
import torch
from torch import nn

class Asks(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * x.sum().item()).mean()

def build():
    return Asks(8, 8), lambda size, generator: {"x": torch.randn(size, 8, generator=generator)}

def fails():
    raise ValueError("no such module")
"""


@pytest.fixture(scope="module")
def make_runner() -> Callable[[], DryRunner]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    yield lambda: DryRunner(trial_function=TRIAL_FUNCTION)
    patch.undo()


class TestDryRunner(RunnerContract):
    """The contract in one process."""


@pytest.mark.prove
def test_a_trial_tells_memory_and_collectives_of_any_world(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKS)
    request = request_for("native", world_size=64, config=TrialConfig(zero_stage=2))
    request = dataclasses.replace(request, workload=Workload(global_batch_size=64, sequence_length=8))
    with DryRunner(python_path=[str(tmp_path)]) as runner:
        foretold = runner.run(request)
        assert foretold.outcome is Outcome.OK, foretold.traceback
        (rank,) = foretold.ranks
        assert foretold.peak_memory_bytes == rank.peak_memory_bytes == sum(rank.memory_by_tag.values())
        assert {each.operation for each in rank.collectives} == {"reduce_scatter", "all_gather", "all_reduce"}
        assert foretold.samples_per_second is None

        limited = runner.run(dataclasses.replace(request, memory_limit_bytes=1000))
        assert limited.outcome is Outcome.INFEASIBLE
        assert limited.message.startswith("rank 0 would need ")

        refused = runner.run(dataclasses.replace(request, config=TrialConfig(tensor_parallel_size=5)))
        assert (refused.outcome, refused.rule) == (Outcome.INVALID, "world-divides")

        other = runner.run(dataclasses.replace(request, engine="ddp", config=TrialConfig()))
        assert (other.outcome, other.rule) == (Outcome.INVALID, "dry-run-engine")

        files = runner.run(dataclasses.replace(request, config=TrialConfig(zero_stage=1, offload_optimizer="nvme")))
        assert (files.outcome, files.rule) == (Outcome.INVALID, "dry-run-nvme")

        asks = runner.run(dataclasses.replace(request, model=FactoryModel(reference="asking:build", parameter_count=72)))
        assert asks.outcome is Outcome.FAILED
        assert "asking:build: its Asks reads the value of a tensor (aten._local_scalar_dense.default)" in asks.message
        assert asks.traceback is None  # one line that names the inner module

        after = runner.run(request)
        assert (after.outcome, after.ranks) == (Outcome.OK, foretold.ranks)
