"""Settings with values of the wrong type or size: a finding or one line, never a traceback."""

import random
from typing import Any

import pytest
from lint_recipes import CASES, RECIPES

from autotune.errors import AutotuneError
from autotune.frameworks.framework import Surroundings
from autotune.frameworks.imported import flat
from autotune.frameworks.read import Written, read_written
from autotune.recipes.lint import lint
from search_spaces.errors import SearchSpaceError

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 10**9, 2.5, float("nan"), "", "two", "auto", [], [1, "x"], {}, {"a": 1}, "none", "full",
)  # fmt: skip
FILES = sorted({case.file for case in CASES if not case.refusal})


@pytest.mark.prove(every=10)
@pytest.mark.parametrize("file", FILES)
def test_a_wrong_value_is_a_finding_or_a_line(file: str) -> None:
    draw = random.Random(file)
    around = Surroundings(ranks=16)  # no cluster: predictions would dominate the time
    for one in read_written(RECIPES / file):
        settings = dict(flat(one.content))
        for _ in range(6):
            key = draw.choice(sorted(settings))
            changed = {**settings, key: draw.choice(VALUES)}
            written = Written(format=one.format, name=one.name, path=one.path, content=changed)
            try:
                lint(written, around)
            except (AutotuneError, SearchSpaceError) as error:
                assert "\n" not in str(error), f"{key}={changed[key]!r}"
