"""A trial's rate in a table: measured, extrapolated, or a bound."""

import dataclasses

import table

from autotune.cli.rows import measured_text
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval


def test_a_bound_and_an_extrapolated_rate_are_told_from_a_measured_one() -> None:
    measured = dataclasses.replace(table.ok(70.0), samples_per_second=Interval(mean=70.0, low=60.0, high=80.0))
    assert measured_text(measured) == "70 [60, 80]"
    assert measured_text(dataclasses.replace(measured, extrapolated=("micro_batches",))) == "~70 [60, 80]"
    assert measured_text(dataclasses.replace(measured, outcome=Outcome.PRUNED)) == "≤ 80"
