"""A trial whose data are scheduled: measured at points of the schedule, told of the whole run."""

import dataclasses

import pytest
import torch

from executor.engine import RankContext
from executor.measurement.trial_report import race_of
from executor.trial.extrapolation import at_point, of_documents, over_schedule, points_of_request
from executor.trial.run import run_trial
from search_spaces.models.model import ModelSpec
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


@pytest.mark.prove
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


DOCUMENTS = dataclasses.replace(RUN, document_lengths=(64, 16, 8, 24, 16))


@pytest.mark.parametrize("packs", [True, False])
def test_documents_are_told_by_useful_tokens(packs: bool) -> None:
    """Packed: two whole rows; padded: five of 64 tokens with 128 useful ones."""
    asked = request(TrialConfig(micro_batch_size=4, pack_sequences=packs), workload=DOCUMENTS)
    share = 1.0 if packs else 128 / 320
    measured = dataclasses.replace(result(2.0, 100, 1.0), message="unstable")
    found = of_documents(asked, measured)
    assert found.step_seconds == (2.0 / share, 2.0 / share)
    assert found.samples_per_second == measured.samples_per_second
    assert found.ranks[0].wait_seconds_per_step == 1.0 / share
    how = "packed into rows" if packs else "in rows of their own"
    assert found.message == f"unstable; 64 useful tokens/s, {share:.1%} of all: documents {how}"
    assert of_documents(request(TrialConfig()), measured) is measured


def test_a_race_is_over_useful_tokens() -> None:
    """A padded step of two seconds has 4 x 0.4 samples' worth: it has lost against 1 sample/s, which 4 samples have not."""
    asked = request(TrialConfig(micro_batch_size=4), workload=DOCUMENTS, rate_to_beat=1.0)
    padded, whole = race_of(asked), race_of(dataclasses.replace(asked, workload=RUN))
    assert padded is not None
    assert whole is not None
    assert padded.samples == pytest.approx(1.6)
    assert padded.is_lost([2.0] * 20)
    assert not whole.is_lost([2.0] * 20)


def test_a_trial_of_packed_documents_measures_and_tells_useful_tokens() -> None:
    asked = request(TrialConfig(micro_batch_size=2, pack_sequences=True), workload=dataclasses.replace(DOCUMENTS, seed=3))
    padded = request(TrialConfig(micro_batch_size=2), workload=DOCUMENTS)
    told: list[Progress] = []
    packed, other = (run_trial(ALONE, one, told.append) for one in (asked, padded))
    executed = []
    for found, share in ((packed, 1.0), (other, 0.4)):
        assert found.outcome is Outcome.OK
        assert found.samples_per_second is not None
        mean = sum(found.step_seconds) / len(found.step_seconds)
        assert found.samples_per_second.mean == pytest.approx(4 / mean, rel=1e-6)
        assert f"{share:.1%} of all: documents" in found.message
        assert found.hardware_tflops_per_device is not None
        executed.append(found.hardware_tflops_per_device * 1e12 * mean * share)
    # Of a step: attention inside of documents in the place of whole rows, two products forward and five backward.
    spared = (
        14 * SPEC.num_layers * SPEC.num_attention_heads * SPEC.head_dim * 4 * (64**2 - (64**2 + 2 * 16**2 + 8**2 + 24**2) / 2)
    )
    assert executed[1] - executed[0] == pytest.approx(spared, rel=1e-6)
