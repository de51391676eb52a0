"""Samples of large matrices of cases: `make test` and `make prove` run some of them, `make nightly` and `make oldest` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases as parameters of a test, tuples as several; all but every so many-th have the mark `nightly`."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[] if number % every == 0 else [pytest.mark.nightly]) for number, row in enumerate(rows)]
