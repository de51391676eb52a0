"""Two ranks that stay warm through all trials of users' scripts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.runners.local import LocalRunner

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="session")
def runner() -> Iterator[LocalRunner]:
    """The scripts find `autotune` here, and no device."""
    with LocalRunner(2, device="cpu", environment={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}) as runner:
        yield runner
