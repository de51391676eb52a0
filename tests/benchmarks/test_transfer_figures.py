"""What one engine's answer is worth on another, on measurements whose answer is known."""

import pytest

from benchmarks.prediction.transfer import DATA, ENGINES, RANKS, agenda, config_for, configurations, finals, read
from benchmarks.prediction.transfer_figures import (
    Measured,
    all_losses,
    by_layout,
    correlation,
    finalists,
    knob_losses,
    mean_rates,
    page,
    winners_loss,
)
from search_spaces.trial_config import TrialConfig

CONFIGS = [TrialConfig(zero_stage=stage, micro_batch_size=micro) for stage in (0, 2) for micro in (1, 2)]
NATIVE = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
"""Best at stage 2 with micro-batch 2."""
TARGET = {0: 8.0, 1: 10.0, 2: 4.0, 3: 5.0}
"""The stage is the wrong way round, the micro-batch is not."""


def rows(engine: str, rates: dict[int, float], repeats: int = 2) -> list[Measured]:
    return [
        Measured(engine=engine, number=number, repeat=repeat, rate=rate * (1.1 if repeat else 1 / 1.1))
        for number, rate in rates.items()
        for repeat in range(repeats)
    ]


def test_repeats_are_averaged_and_failures_left_out() -> None:
    failed = Measured(engine="native", number=4, repeat=0, rate=0.0)
    assert mean_rates([*rows("native", NATIVE), failed], "native") == pytest.approx(NATIVE)


def test_ranks_are_compared_where_both_ran() -> None:
    assert correlation(NATIVE, {number: rate for number, rate in NATIVE.items() if number}) == (1.0, 3)
    told, count = correlation(NATIVE, TARGET)
    assert count == 4
    assert told == pytest.approx(-0.6)


def test_the_winners_loss() -> None:
    assert winners_loss(NATIVE, TARGET) == (3, 1, 0.5)


def test_a_knob_is_charged_with_what_it_alone_loses() -> None:
    losses = {loss.knob: loss for loss in knob_losses(NATIVE, TARGET, CONFIGS)}
    assert {knob: loss.share for knob, loss in losses.items()} == {"zero_stage": 0.5, "micro_batch_size": 0.0}
    assert {knob for knob, loss in losses.items() if loss.specific} == {"zero_stage"}


def test_a_layout_that_is_given_has_winners_and_losses_of_its_own() -> None:
    slower_with_two = {**TARGET, 3: 3.0}
    groups = by_layout(NATIVE, slower_with_two, CONFIGS)
    assert {layout: winners_loss(*group) for layout, group in groups.items()} == {
        "the defaults": (1, 1, 0.0), "zero_stage=2": (3, 2, 0.25),
    }  # fmt: skip
    (loss,) = knob_losses(*groups["zero_stage=2"], CONFIGS, "zero_stage=2")
    assert (loss.knob, loss.share, loss.specific) == ("micro_batch_size", 0.25, True)
    measured = [*rows("native", NATIVE), *rows("deepspeed", slower_with_two)]
    assert finalists(measured, CONFIGS) == [1, 2, 3]
    assert "| micro_batch_size | 0.0 % | 25.0 % (zero_stage=2) | 2 | 1 | engine-specific |" in page(measured, CONFIGS, 500)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_each_engine_declares_what_was_measured_to_be_its_own(engine: str) -> None:
    measured = read(DATA)
    losses = all_losses(mean_rates(measured, "native"), mean_rates(measured, engine), configurations())
    assert {loss.knob for some in losses for loss in some if loss.specific} == ENGINES[engine].specific


def test_finals_repeat_what_the_answer_rests_on() -> None:
    measured = [*rows("native", NATIVE), *rows("deepspeed", NATIVE)]
    jobs = finals(measured, 2, 3)
    assert {(number, repeat) for _, number, _, repeat in jobs} == {
        (number, repeat) for number in finalists(measured, configurations()) for repeat in (2, 3, 4)
    }
    assert {engine for engine, *_ in jobs} >= {"native", "deepspeed"}


def test_the_page_tells_matrix_losses_and_knobs() -> None:
    text = "\n".join(page([*rows("native", NATIVE), *rows("deepspeed", TARGET)], CONFIGS, 500))
    assert "| native | 1.00 (4) | -0.60 (4) |" in text
    assert "loses 50.0% on deepspeed" in text
    assert "`zero_stage`: tuned on deepspeed only" in text
    assert "13.5 %" in text  # of repeats
    assert page([], CONFIGS, 500) == []


def test_each_engine_gets_at_least_24_configurations_in_turn() -> None:
    jobs = agenda(2, 1)
    for engine in ENGINES:
        mine = [(number, repeat) for one, number, _, repeat in jobs if one == engine]
        assert len({number for number, _ in mine}) >= 24
        assert len(mine) == len(set(mine))
    assert all(not ENGINES[engine].refusals(config, RANKS) for engine, _, config, _ in jobs)
    alone = configurations()[-1]
    asked = config_for("fsdp2", alone)
    assert asked is not None
    assert asked.zero_stage == 2
