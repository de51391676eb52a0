"""The page of plans beside recipes: its recipes are layouts that can be predicted, and its sentences are of the predictions."""

import dataclasses
import re

import pytest

from autotune.prediction.planning.estimate import StepEstimate
from benchmarks.prediction.plan_recipes import CASES, look, page, problems_of, question_of_case


def test_every_recipe_is_a_legal_layout_of_its_case() -> None:
    for case in CASES:
        question = question_of_case(case)
        for recipe in case.recipes:
            config = dataclasses.replace(question, pins=recipe.knobs).config()
            assert all(getattr(config, name) == value for name, value in recipe.knobs.items())


@pytest.mark.prove
def test_a_case_is_told_with_both_predictions_and_why_they_differ() -> None:
    found = look(CASES[0])
    assert problems_of(found) == []
    text = page([found])
    for recipe, told in found.recipes:
        assert isinstance(told, StepEstimate)
        assert recipe.source in text
        assert f"{told.samples_per_second.mean:.4g} [" in text
    assert f"{found.first.estimate.samples_per_second.mean:.4g} [" in text
    # The recipe of this very cluster divides samples over 2 ranks, too.
    assert found.first.estimate.config.context_parallel_size == 2
    assert "within what predictions for one machine are off by" in text
    assert re.search(r"[\d.]+ s (more|less) compute", text)
