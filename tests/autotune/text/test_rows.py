"""Rows of trials: their rates (measured, extrapolated, or a bound), and which knobs they show."""

import dataclasses

import table

from autotune.text.rows import TrialRows, measured_text
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig


def test_a_bound_and_an_extrapolated_rate_are_told_from_a_measured_one() -> None:
    measured = dataclasses.replace(table.ok(70.0), samples_per_second=Interval(mean=70.0, low=60.0, high=80.0))
    assert measured_text(measured) == "70 [60, 80]"
    assert measured_text(dataclasses.replace(measured, extrapolated=("micro_batches",))) == "~70 [60, 80]"
    assert measured_text(dataclasses.replace(measured, outcome=Outcome.PRUNED)) == "≤ 80"


def test_a_row_has_every_knob_that_differs_from_the_baseline_or_from_the_row_above() -> None:
    baseline = TrialConfig(zero_stage=1, reduce_bucket_size=1000, precision="bf16")
    rows = TrialRows(None)
    assert rows.describe(baseline) == "zero_stage=1 micro_batch_size=1 reduce_bucket_size=1000 precision=bf16"
    # A knob that goes back to its default differs from the baseline; so does one that the space does not search.
    back = baseline.replace({"reduce_bucket_size": 500_000_000, "compile_blocks": True})
    assert rows.describe(back) == "zero_stage=1 micro_batch_size=1 reduce_bucket_size=500000000 compile_blocks=true"
    # As the baseline has it, and not as the row above.
    again = baseline.replace({"micro_batch_size": 4})
    assert rows.describe(again) == "zero_stage=1 micro_batch_size=4 reduce_bucket_size=1000 compile_blocks=false"
    assert rows.describe(again) == "zero_stage=1 micro_batch_size=4"


def test_rows_of_a_job_that_goes_on_are_told_by_its_own_baseline() -> None:
    rows = TrialRows(TrialConfig(zero_stage=2))
    assert rows.describe(TrialConfig(zero_stage=0, overlap_comm=False)) == "zero_stage=0 micro_batch_size=1 overlap_comm=false"
