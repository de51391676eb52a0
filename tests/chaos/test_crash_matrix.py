"""Server, worker, Ray driver and database killed at random points, on both databases: nothing lost, nothing twice.

By itself a small soak without Ray. With AUTOTUNE_CHAOS_KILLS the whole one: thrice as many kills, on at least 20 jobs.
AUTOTUNE_CHAOS_SEED repeats the choices of a run, AUTOTUNE_CHAOS_LOGS keeps what the processes wrote, and AUTOTUNE_CRASH_MATRIX
names the page that is written.
"""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.databases import ChaosDatabase, ChaosPostgreSQL, ChaosSqlite
from tests.chaos.report import Row, page
from tests.chaos.soak import Size, keep_logs, soak
from tests.chaos.verify import verify
from tests.storage.conftest import start_postgres

pytestmark = [pytest.mark.chaos, pytest.mark.nightly]

KILLS = int(os.environ.get("AUTOTUNE_CHAOS_KILLS", "0"))
SEED = int(os.environ.get("AUTOTUNE_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
MEASURED = {
    "outcome": "OK", "losses": [5.0, 4.5], "step_seconds": [0.1] * 5, "within_relative_error": 0.01, "peak_memory_bytes": 10**6,
    "samples_per_second": {"mean": 80.0, "low": 79.0, "high": 81.0},
}  # fmt: skip
SMALL = Size(
    servers=1, replayers=1, ray=False, jobs={"local": 3}, trials={"local": 5}, kills=3, most_pause=1.5, end_seconds=120.0
)  # fmt: skip
WHOLE = Size(
    servers=1, replayers=1, ray=True, jobs={"local": 15, "ray": 5}, trials={"local": 12, "ray": 3}, kills=3 * KILLS,
    most_pause=4.0, end_seconds=600.0,
)  # fmt: skip
SECONDS_PER_TRIAL = 0.4 if KILLS else 0.1


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """What was found, by database; written down in the end."""
    rows: list[Row] = []
    yield rows
    if name := os.environ.get("AUTOTUNE_CRASH_MATRIX"):
        Path(name).write_text(page(rows), encoding="utf-8")


@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_everything_is_killed_and_nothing_is_lost(kind: str, tmp_path: Path, rows: list[Row]) -> None:
    size = WHOLE if KILLS else SMALL
    if kind == "sqlite":
        rows.append(_soaked(tmp_path, ChaosSqlite(tmp_path / "jobs.db"), size))
        return
    with start_postgres() as server:
        larger = replace(size, servers=2, replayers=2 if KILLS else 1, long_outages=int(KILLS > 0))
        rows.append(_soaked(tmp_path, ChaosPostgreSQL(server), larger))


def _soaked(folder: Path, database: ChaosDatabase, size: Size) -> Row:
    print(f"seed {SEED}")  # noqa: T201  shown where the test fails
    table = json.dumps({"*": MEASURED, "seconds_per_trial": SECONDS_PER_TRIAL})
    try:
        soaked = soak(folder, database, size, SEED, table)
    finally:
        if name := os.environ.get("AUTOTUNE_CHAOS_LOGS"):
            keep_logs(folder, Path(name) / database.name)
    for line in (*soaked.kills, *soaked.exits):
        print(line)  # noqa: T201
    assert soaked.mistakes == []
    # What ends by itself could not start, because the database was away just then, or held by who was stopped to be killed.
    away = ("cannot be used", "is locked")
    assert [exit for exit in soaked.exits if not any(words in exit.last_line for words in away)] == []
    return Row(soaked=soaked, found=verify(database.address, soaked.jobs))
