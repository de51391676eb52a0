"""The tables of options."""

import pytest

from autotune.frameworks.framework import BATCH, Framework
from autotune.frameworks.read import FRAMEWORKS
from autotune.question.assumption import VOCABULARY
from search_spaces.knob_values import KNOBS

EACH = pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)


@EACH
def test_a_setting_is_one_row_and_states_a_knob_or_nothing(framework: Framework) -> None:
    keys = [option.key for option in framework.options]
    assert len(keys) == len(set(keys))
    assert {option.knob for option in framework.options} <= {"", BATCH, VOCABULARY, *KNOBS}


@EACH
def test_words_are_those_of_the_knob(framework: Framework) -> None:
    for option in framework.options:
        for value in option.words or ():
            choices = KNOBS[option.knob].choices
            assert value in choices or isinstance(value, bool), (option, value)


@EACH
def test_names_of_checks_are_unique(framework: Framework) -> None:
    names = [check.name for check in framework.checks]
    assert len(names) == len(set(names))
