"""Two ranks that stay warm through the trials of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.runners.local import LocalRunner

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def runner(forked_ranks: None) -> Iterator[LocalRunner]:
    """The scripts find `autotune` here, and no device. They are processes of their own."""
    with LocalRunner(2, device="cpu", environment={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}) as runner:
        yield runner
