"""A trial whose data are scheduled: measured at points of the schedule, told of the whole run."""

import dataclasses

import pytest
import torch

from executor.engine import RankContext
from executor.trial import run_trial
from executor.trial_schedule import at_point, over_schedule, points_of_request
from search_spaces.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, Interval, Progress, RankMeasurement, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

SPEC = ModelSpec(
    name="scheduled", family="llama", num_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=64, vocab_size=256, sequence_length=64,
)  # fmt: skip
RUN = Workload(global_batch_size=4, sequence_length=64, training_steps=100)
CURRICULUM = TrialConfig(micro_batch_size=4, curriculum_start_length=16, curriculum_steps=50)
RANDOM_LTD = TrialConfig(micro_batch_size=4, random_ltd_start_tokens=16, random_ltd_steps=50)
ALONE = RankContext(rank=0, world_size=1, device=torch.device("cpu"))


def request(config: TrialConfig, **fields: object) -> TrialRequest:
    quick = Fidelity(min_steps=2, max_steps=2, max_warmup_steps=2)
    asked = TrialRequest(attempt="1", model=SPEC, config=config, workload=RUN, world_size=1, fidelity=quick)
    return dataclasses.replace(asked, **fields)  # type: ignore[arg-type]


def result(seconds: float, peak: int, tflops: float) -> TrialResult:
    rank = RankMeasurement(
        rank=0, host="here", peak_memory_bytes=peak, memory_by_tag={}, tag_peak_bytes={}, rss_peak_bytes=0,
        cpu_seconds_per_step=seconds, collectives=(), wait_seconds_per_step=0.5 * seconds,
    )  # fmt: skip
    return TrialResult(
        attempt="1", outcome=Outcome.OK, step_seconds=(seconds, seconds), peak_memory_bytes=peak, ranks=(rank,),
        samples_per_second=Interval(mean=1.0, low=1.0, high=1.0), tflops_per_device=tflops, phase_seconds={"measure": 1.0},
    )  # fmt: skip


def test_the_longest_samples_come_first_and_alone_hold_the_reference() -> None:
    """What does not fit is known after one point; its losses are those of whole samples from the same weights."""
    asked = request(CURRICULUM, reference_losses=(5.0, 4.0), rate_to_beat=3.0)
    points = points_of_request(asked)
    assert [point.length for point in points] == [64, 40, 16]
    made = [at_point(asked, point) for point in points]
    assert [one.workload.schedule_step for one in made] == [50, 25, 0]
    assert [one.reference_losses for one in made] == [(5.0, 4.0), (), ()]
    assert {one.rate_to_beat for one in made} == {None}
    assert [points_of_request(one) for one in made] == [(), (), ()]
    assert points_of_request(request(TrialConfig())) == ()


def test_rates_are_of_useful_tokens_over_the_whole_run() -> None:
    asked = request(CURRICULUM)
    points = points_of_request(asked)
    seconds = {64: 4.0, 40: 2.0, 16: 1.0}
    found = over_schedule(asked, points, [result(seconds[point.length], point.length, 1.0) for point in points])
    # Of the run's 100 steps: the growing ones' polynomial through the points, summed; whole ones.
    grown = [16 + 48 * step // 50 // 8 * 8 for step in range(50)]
    spent = sum(1.0 + (length - 16) / 24 + ((length - 16) / 24) * ((length - 40) / 24) / 2 for length in grown) + 50 * 4.0
    tokens = 4 * (sum(grown) + 50 * 64)
    assert found.samples_per_second is not None
    assert found.samples_per_second.mean == pytest.approx(tokens / spent / 64)
    assert found.step_seconds[0] == pytest.approx(spent / tokens * 4 * 64)
    assert found.peak_memory_bytes == 64
    assert found.tflops_per_device == pytest.approx(1.0)
    (rank,) = found.ranks
    assert rank.wait_seconds_per_step == pytest.approx(0.5 * found.step_seconds[0])
    assert found.phase_seconds == {"measure": 3.0}
    assert f"{tokens / spent:,.0f} useful tokens/s over 100 steps, measured with samples of 16, 40, 64 tokens" in found.message


def test_tokens_that_layers_drop_are_useful_all_the_same() -> None:
    asked = request(RANDOM_LTD)
    points = points_of_request(asked)
    found = over_schedule(asked, points, [result(2.0, 1, 1.0) for _ in points])
    assert found.samples_per_second is not None
    assert found.samples_per_second.mean == pytest.approx(4 / 2.0)
    assert "measured with middle layers on 16, 40, 64 tokens" in found.message


@pytest.mark.parametrize("config", [CURRICULUM, RANDOM_LTD], ids=("curriculum", "random-LTD"))
def test_a_real_trial_goes_through_the_points(config: TrialConfig) -> None:
    told: list[Progress] = []
    found = run_trial(ALONE, request(config), told.append)
    plain = run_trial(ALONE, request(TrialConfig(micro_batch_size=4)), told.append)
    assert found.outcome is Outcome.OK
    assert found.losses == plain.losses
    assert found.peak_memory_bytes == pytest.approx(plain.peak_memory_bytes, rel=0.01)
    assert [one.phase for one in told].count("build") == 4
    executed = (found.hardware_tflops_per_device, plain.hardware_tflops_per_device)
    assert all(value is not None and value > 0 for value in executed)
