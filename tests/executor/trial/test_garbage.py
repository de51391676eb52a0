"""When Python collects in a trial: at chosen steps, and as before when it is over."""

import gc
from collections.abc import Iterator

import pytest
import torch

from executor.engine import RankContext
from executor.trial.process import collected_by_steps
from executor.trial.run import run_trial
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Fidelity, Progress, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

SMALL = ModelSpec(
    name="small", family="llama", num_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    ffn_hidden_size=24, vocab_size=32, sequence_length=16,
)  # fmt: skip
FIDELITY = Fidelity(min_steps=6, max_steps=6, max_warmup_steps=4, measure_memory=False)


@pytest.fixture
def generations() -> Iterator[list[int]]:
    """Of every collection while Python collects nothing by itself, the oldest generation that it looked at."""
    met: list[int] = []

    def note(phase: str, told: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            met.append(told["generation"])

    gc.callbacks.append(note)
    yield met
    gc.callbacks.remove(note)


def trial(interval: int, engine: str = "native") -> tuple[TrialResult, list[bool]]:
    """The result, and of each step whether Python collected by itself in it."""
    request = TrialRequest(
        attempt="one", model=SMALL, config=TrialConfig(gc_interval=interval, precision="fp64"), world_size=1, engine=engine,
        workload=Workload(global_batch_size=2, sequence_length=16), fidelity=FIDELITY,
    )  # fmt: skip
    steps: list[bool] = []

    def tell(progress: Progress) -> None:
        if progress.samples_per_second is not None:
            steps.append(gc.isenabled())

    return run_trial(RankContext(rank=0, world_size=1, device=torch.device("cpu")), request, tell), steps


@pytest.mark.prove
@pytest.mark.parametrize("engine", ["native", "ddp"])
def test_a_trial_collects_at_its_steps_alone(generations: list[int], engine: str) -> None:
    result, steps = trial(3, engine)
    assert generations == [1] * ((len(steps) - 1) // 3)
    assert not any(steps)
    assert gc.isenabled()
    plain, by_itself = trial(0, engine)
    assert result.losses == plain.losses
    assert all(by_itself)


def test_an_interval_above_the_steps_collects_in_none(generations: list[int]) -> None:
    _, steps = trial(1000)
    assert steps
    assert generations == []


@pytest.mark.parametrize("collecting", [True, False])
def test_what_was_before_is_there_again(collecting: bool) -> None:
    """Also where the trial fails, and where nobody let Python collect before."""
    if not collecting:
        gc.disable()
    try:
        with pytest.raises(ValueError, match="failed"), collected_by_steps(5):
            assert not gc.isenabled()
            raise ValueError("failed")
        assert gc.isenabled() is collecting
    finally:
        gc.enable()


def test_without_an_interval_nothing_changes(generations: list[int]) -> None:
    with collected_by_steps(0):
        assert gc.isenabled()
    assert generations == []
