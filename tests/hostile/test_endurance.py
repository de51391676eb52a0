"""Nothing grows and every job ends, however long clients are hostile: AUTOTUNE_HOSTILE_MINUTES says how long."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.endurance import Endured, endure, page

pytestmark = pytest.mark.hostile
MINUTES = float(os.environ.get("AUTOTUNE_HOSTILE_MINUTES", "0"))


@pytest.fixture(scope="module")
def endured() -> Iterator[list[Endured]]:
    """What happened on each database; written down in the end, where the variable names the page."""
    found: list[Endured] = []
    yield found
    if path := os.environ.get("AUTOTUNE_HOSTILE_ENDURANCE"):
        Path(path).write_text(page(found), encoding="utf-8")


@pytest.mark.skipif(not MINUTES, reason="takes minutes; runs with AUTOTUNE_HOSTILE_MINUTES")
def test_nothing_grows_and_every_job_ends(tmp_path: Path, database: str, endured: list[Endured]) -> None:
    found = endure(tmp_path, database, MINUTES)
    endured.append(found)
    print(page([found]), dict(found.asked))  # noqa: T201  read with -s
    assert found.unexpected == []
    assert found.jobs["SUCCEEDED"] > 0
    assert found.growth() == []
