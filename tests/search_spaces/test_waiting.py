"""Advice on data loading: only what the command can do."""

import pytest

from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model
from search_spaces.placeholders import waiting_text

PLAIN = CommandModel(arguments=("python", "train.py"))
SEARCHED = CommandModel(arguments=("python", "train.py", "{loader_workers}"), script_knobs={"loader_workers": ("0", "2")})


@pytest.mark.parametrize(
    ("model", "says", "not_said"),
    [
        (PLAIN, "pass it {num_workers} and search --script-knob num_workers=0,2,4", "larger values"),
        (SEARCHED, "search larger values of loader_workers", "--script-knob"),
        (FactoryModel(reference="m:f", parameter_count=1), "prepare samples beforehand", "larger values"),
    ],
)
def test_advice_on_workers_fits_what_the_command_passes_on(model: Model, says: str, not_said: str) -> None:
    text = waiting_text(0.2, model)
    assert "waits for data in 20% of the step" in text
    assert says in text
    assert not_said not in text
    assert waiting_text(0.04, model) == ""
