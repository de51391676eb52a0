"""Predictions against the libraries of fine-tuners themselves, where they are installed."""

import os
import subprocess
import sys

import pytest

from benchmarks.prediction.stacks import BOUND, PACKAGES, compared, page, predicted_bytes, variants

PYTHON = os.environ.get("AUTOTUNE_STACKS_PYTHON", sys.executable)
"""A Python with the packages."""


def test_every_stack_is_predicted() -> None:
    cases = list(variants())
    assert len({case["name"] for case in cases}) == len(cases)
    assert all(predicted_bytes(case) > 1e6 for case in cases)


@pytest.mark.nightly
def test_libraries_keep_what_is_predicted() -> None:
    script = f"import importlib.metadata as m; [m.version(p) for p in {PACKAGES!r}]"
    if subprocess.run([PYTHON, "-c", script], capture_output=True).returncode:
        pytest.skip(f"needs {', '.join(PACKAGES)}, or AUTOTUNE_STACKS_PYTHON, a Python that has them")
    runs = compared(PYTHON, list(variants()))
    assert not [run for run in runs if not abs(run.error) <= BOUND]
    assert any("stacks trained" in line for line in page(runs, "of this environment"))
