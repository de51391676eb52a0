"""What `make parity` says of narrow types is told where it does not hold: beyond a bound of the loss, or off a closed form."""

import dataclasses

import pytest
import torch

from benchmarks.correctness.bytes_of_types import HELD, closed_form, differing
from benchmarks.correctness.bytes_of_types import section as bytes_section
from benchmarks.correctness.loss_of_types import (
    BOUND,
    LAYOUT,
    MEAN_BOUND,
    SEEDS,
    SLICED,
    TYPES,
    Ends,
    problems,
    products_of_blocks,
)
from benchmarks.correctness.loss_of_types import section as loss_section
from executor.parallel.quantised import float8_linear
from search_spaces.knobs.computation import FP8_RECIPES, MXFP8
from search_spaces.trial_config import TrialConfig

EXACT = Ends(name="fp32", losses=(2.0,) * SEEDS)


def off(*shares: float) -> Ends:
    """Each seed so far from what is exact; the seeds that are not given are exact."""
    rest = (0.0,) * (SEEDS - len(shares))
    return Ends(name="other", losses=tuple(2.0 * (1 + share) for share in (*shares, *rest)))


@pytest.mark.parametrize("ends", [off(1.1 * BOUND), off(*(1.1 * MEAN_BOUND,) * SEEDS), off(float("nan"))], ids=str)
def test_a_loss_beyond_a_bound_is_told(ends: Ends) -> None:
    (told,) = problems([EXACT, ends])
    assert told.startswith("other ends ")


def test_losses_on_both_sides_within_the_bound_are_let_pass() -> None:
    ends = off(0.9 * BOUND, -0.9 * BOUND)
    assert [*problems([EXACT, ends])] == []
    assert "| other | 2.0090 | 1.9910 | 2.0000 | 2.0000 | 2.0000 | +0.0e+00 | 4.5e-03 |" in loss_section([EXACT, ends])


def test_a_rank_that_holds_something_else_is_told() -> None:
    right = {name: [closed_form(TrialConfig().replace({**LAYOUT, **knobs}))] * 2 for name, knobs in HELD.items()}
    assert differing(right) == []
    held = right["bf16"][0]
    (told,) = differing({**right, "bf16": [held, dataclasses.replace(held, gradients=held.gradients + 4)]})
    assert told.startswith("bf16, rank 1: ")


def test_what_is_saved_is_what_the_types_are_narrower_by() -> None:
    held = {name: [closed_form(TrialConfig().replace({**LAYOUT, **knobs}))] for name, knobs in HELD.items()}
    text = bytes_section(held)
    assert "| bf16 | 394,368 | 591,556 | 197,184 | -394,368 (-25.0%) | 1,577,472 | – |" in text
    assert "| bf16, reduced in bf16 | 394,368 | 591,556 | 197,184 | -394,368 (-25.0%) | 788,736 | -788,736 (-50.0%) |" in text


def test_every_recipe_of_8_bits_has_its_rows() -> None:
    types = [*TYPES.values(), *SLICED.values()]
    for recipe in FP8_RECIPES:
        assert sum(knobs.get("fp8_recipe") == recipe for knobs in types) == 2


def test_products_of_blocks_are_as_near_as_8_bits_are() -> None:
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(32, 96).bfloat16()
    with products_of_blocks():
        result = float8_linear(x, weight, MXFP8).double()
    exact = x.double() @ weight.double().T
    assert 1e-3 < float((result - exact).norm() / exact.norm()) < 0.05
