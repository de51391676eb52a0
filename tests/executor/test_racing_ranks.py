"""Races and extrapolation on real ranks. Steps are counted; no time is asserted."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from executor.runners.local import LocalRunner
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

SPEC = ModelSpec(
    name="raced", family="llama", num_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=64, vocab_size=64, sequence_length=32,
)  # fmt: skip
PATIENT = Fidelity(min_steps=5, max_steps=30, max_seconds=1e9, max_warmup_steps=6, target_relative_half_width=1e-12)
"""Without a race: thirty steps, whatever they show."""
BRIEF = Fidelity(min_steps=2, max_steps=4, max_warmup_steps=6)
TRIES = 8
"""Where what a neighbour's load adds can hide what is looked for: all of them in a row, and it is not there."""
Run = Callable[..., TrialResult]


@pytest.fixture(scope="module")
def run(forked_ranks: None) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch, LocalRunner(2, device="cpu") as runner:
        # On a busy machine the other rank's failure comes later than it is worth waiting for elsewhere.
        patch.setattr("executor.runners.verdict.CLEAN_GRACE_SECONDS", 60.0)
        patch.setattr("executor.runners.gang.REJOIN_SECONDS", 120.0)

        def measured(fidelity: Fidelity, batch: int = 4, **fields: object) -> TrialResult:
            config, model = fields.pop("config", TrialConfig(zero_stage=1)), fields.pop("model", SPEC)
            assert isinstance(config, TrialConfig)
            assert isinstance(model, ModelSpec)
            result = runner.run(
                TrialRequest(
                    attempt="a",
                    model=model,
                    config=config,
                    workload=Workload(global_batch_size=batch, sequence_length=8),
                    world_size=2,
                    fidelity=fidelity,
                    **fields,
                )
            )
            assert result.traceback is None, result.traceback
            return result

        yield measured


def test_a_slow_trial_ends_before_its_steps_are_timed_and_keeps_its_memory(run: Run) -> None:
    result = run(PATIENT, rate_to_beat=1e9, race_spread=0.05)
    assert result.outcome is Outcome.PRUNED
    assert result.step_seconds == ()
    assert result.samples_per_second is not None
    assert result.samples_per_second.low < result.samples_per_second.mean < result.samples_per_second.high < 1e9
    assert "1e+09" in result.message
    assert f"{result.samples_per_second.high:.4g}" in result.message
    assert (result.peak_memory_bytes or 0) > 0
    assert [rank.rank for rank in result.ranks] == [0, 1]


@pytest.mark.prove
def test_a_trial_of_a_third_of_the_best_rate_ends_while_it_is_timed_and_the_ranks_go_on(run: Run) -> None:
    for _ in range(TRIES):
        whole = run(PATIENT)
        assert (whole.outcome, len(whole.step_seconds)) == (Outcome.OK, 30)
        assert whole.samples_per_second is not None
        # Below what ends it in warm-up, which is three times its fastest step's rate.
        best = 2.9 * 4 / min(whole.step_seconds)
        pruned = run(dataclasses.replace(PATIENT, max_steps=100), rate_to_beat=best, race_spread=0.01)
        if pruned.outcome is Outcome.PRUNED:  # else a neighbour's load slowed the first alone
            break
    assert pruned.outcome is Outcome.PRUNED
    assert len(pruned.step_seconds) < 100
    assert pruned.warm, "every rank came to the same end, or the gang would have been killed"
    assert (pruned.peak_memory_bytes or 0) > 0
    assert run(BRIEF).warm


@pytest.mark.nightly
def test_a_trial_that_reaches_the_best_is_measured_to_its_end(run: Run) -> None:
    result = run(PATIENT, rate_to_beat=1e-3, race_spread=0.05)
    assert (result.outcome, len(result.step_seconds)) == (Outcome.OK, 30)


INTERLEAVED = {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b", "virtual_stages": 2}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TrialConfig(zero_stage=2), id="zero-2", marks=pytest.mark.nightly),
        pytest.param(TrialConfig(zero_stage=3), id="zero-3", marks=pytest.mark.nightly),
        pytest.param(TrialConfig(pipeline_parallel_size=2, pipeline_schedule="1f1b"), id="1f1b", marks=pytest.mark.nightly),
        pytest.param(TrialConfig().replace(INTERLEAVED), id="interleaved", marks=pytest.mark.nightly),
    ],
)
def test_what_is_extrapolated_is_marked_and_all_else_is_the_full_steps(run: Run, config: TrialConfig) -> None:
    batch = 8 * config.data_parallel_size(2)
    full = run(BRIEF, batch, config=config)
    brief = Fidelity(min_steps=2, max_steps=40, max_warmup_steps=6, most_micro_batches=4)
    for _ in range(TRIES):
        fewer = run(brief, batch, config=config, reference_losses=full.losses)
        if fewer.extrapolated:  # else a neighbour's load hid that more micro-batches take longer, and whole steps were timed
            break
    assert (full.extrapolated, fewer.extrapolated) == ((), ("micro_batches",))
    assert "from steps of 2 and 4 micro-batches to 8" in fewer.message
    # Only whole steps have losses that can be held against the reference.
    assert fewer.losses == full.losses[:2]
    assert fewer.hardware_tflops_per_device is not None
    for one, other in zip(full.ranks, fewer.ranks, strict=True):
        assert one.collectives == other.collectives


@pytest.mark.prove
def test_a_wrong_reference_is_told_by_whole_steps_of_an_extrapolated_trial(run: Run) -> None:
    result = run(Fidelity(most_micro_batches=4), 16, reference_losses=(1.0, 1.0, 1.0))
    assert result.outcome is Outcome.WRONG


@pytest.mark.prove
def test_no_more_than_the_most_is_measured_in_full(run: Run) -> None:
    result = run(Fidelity(min_steps=2, max_steps=4, max_warmup_steps=6, most_micro_batches=8), 16)
    assert result.extrapolated == ()


@pytest.mark.parametrize(
    "config",
    [
        TrialConfig(zero_stage=2, activation_checkpointing="full"),
        TrialConfig(pipeline_parallel_size=2, pipeline_schedule="1f1b"),
    ],
    ids=["zero-2", "1f1b"],
)
@pytest.mark.nightly
def test_a_deep_model_from_two_shallower_ones_is_marked_and_what_layers_add_is_exact(run: Run, config: TrialConfig) -> None:
    deep = dataclasses.replace(SPEC, num_layers=10)
    full = run(BRIEF, config=config, model=deep)
    for _ in range(TRIES):
        fewer = run(dataclasses.replace(BRIEF, most_layers=4), config=config, model=deep, reference_losses=(1.0, 1.0, 1.0))
        if fewer.extrapolated:  # else a neighbour's load hid that more layers take longer, and the whole model was run
            break
    assert (fewer.outcome, fewer.extrapolated, fewer.losses) == (Outcome.OK, ("layers",), ())
    assert "extrapolated from models of 2 and 4 layers to 10" in fewer.message
    assert work_of(fewer) == pytest.approx(work_of(full), rel=1e-6)
    for one, other in zip(full.ranks, fewer.ranks, strict=True):
        for tag in ("parameters", "optimizer_state"):
            assert other.tag_peak_bytes[tag] == one.tag_peak_bytes[tag]
        assert 0.9 * one.peak_memory_bytes < other.peak_memory_bytes <= one.peak_memory_bytes
        assert sum(other.memory_by_tag.values()) == other.peak_memory_bytes
        sent, extrapolated = ({c.operation: c.bytes for c in rank.collectives} for rank in (one, other))
        assert extrapolated == sent


@pytest.mark.nightly
def test_an_extrapolated_peak_beyond_the_limit_is_told_and_that_of_a_depth_is_INFEASIBLE(run: Run) -> None:
    deep = dataclasses.replace(SPEC, num_layers=40)
    shallow = run(BRIEF, model=dataclasses.replace(SPEC, num_layers=4))
    brief, peak = dataclasses.replace(BRIEF, most_layers=4), shallow.peak_memory_bytes or 0
    for _ in range(TRIES):
        beyond = run(brief, model=deep, memory_limit_bytes=2 * peak)
        if beyond.extrapolated:
            break
    assert beyond.outcome is Outcome.OK
    assert (beyond.peak_memory_bytes or 0) > 2 * peak
    assert run(brief, model=deep, memory_limit_bytes=peak - 1).outcome is Outcome.INFEASIBLE
    assert run(BRIEF).warm, "every rank came to the same end"


def work_of(result: TrialResult) -> float:
    """10^12 FLOPs that were executed in a step, on the mean of the ranks."""
    assert result.hardware_tflops_per_device is not None
    return result.hardware_tflops_per_device * sum(result.step_seconds) / len(result.step_seconds)
