"""A database of the first revision is upgraded to the newest, keeps its rows, and its jobs continue."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.plain import to_plain
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage import migrations
from storage.leases import current_owner
from storage.records import Ask
from storage.store import open_store
from tests.storage.postgres import PostgresServer

FIRST = "r001"
NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "%s"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("upgraded", sa.Boolean(), nullable=False, server_default=sa.true()))
"""
"""A revision after the newest one."""
THEN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path) -> str:
    """The address of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'old.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database("old")


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The program has one revision more."""
    scripts = shutil.copytree(Path(migrations.__file__).parent, tmp_path / "migrations")
    (scripts / "versions" / "next.py").write_text(NEXT % migrations.HEAD)
    monkeypatch.setattr(migrations, "SCRIPT_LOCATION", str(scripts))
    monkeypatch.setattr(migrations, "HEAD", "next")
    return "next"


def make_first(address: str) -> None:
    """The tables of the first revision, with a job in every state, each with a measured, a wanted and a running trial."""
    engine = sa.create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", migrations.SCRIPT_LOCATION)
        config.set_main_option("path_separator", "os")
        command.upgrade(config, FIRST)
        tables = sa.MetaData()
        tables.reflect(connection)
        for number, state in enumerate(JobState):
            fill(connection, tables, f"20260101-00000{number}-aaaa", state)
    engine.dispose()


def fill(connection: sa.Connection, tables: sa.MetaData, job_id: str, state: JobState) -> None:
    moment = THEN.replace(tzinfo=None) if connection.dialect.name == "sqlite" else THEN
    held = {"lease_host": "elsewhere", "lease_pid": 1, "lease_started": 1.0, "lease_expires": moment, "lease_seen": moment}
    values = {
        "id": job_id, "created": moment, "updated": moment, "state": state.value, "reason": "", "message": "",
        "request": {"model": "m"}, "active_seconds": 1.5, "trial_count": 3, "event_count": 1, "lease_token": 1,
    }  # fmt: skip
    running = state in (JobState.RUNNING, JobState.PAUSING, JobState.STOPPING, JobState.CANCELLING)
    connection.execute(tables.tables["jobs"].insert().values(values | (held if running else {})))
    event = {"job_id": job_id, "sequence": 1, "time": moment, "kind": "job_created", "payload": {}}
    connection.execute(tables.tables["events"].insert().values(event))
    for number in range(3):
        config = TrialConfig(micro_batch_size=number + 1)
        row = {
            "job_id": job_id, "number": number, "config": to_plain(config), "config_hash": config.hash, "purpose": "search",
            "fidelity": "full", "repeat": 0, "counted": number != 1, "outcome": "OK" if number == 0 else None,
            "attempt_count": int(number != 1), "created": moment,
        }  # fmt: skip
        connection.execute(tables.tables["trials"].insert().values(row))
        if number != 1:
            token = f"{job_id}-{number}"
            result = to_plain(TrialResult(attempt=token, outcome=Outcome.OK)) if number == 0 else None
            attempt = {
                "token": token, "job_id": job_id, "trial_number": number, "number": 1, "host": "elsewhere", "started": moment,
                "state": "accepted" if number == 0 else "running", "outcome": "OK" if number == 0 else None, "result": result,
            }  # fmt: skip
            connection.execute(tables.tables["attempts"].insert().values(attempt))


def test_rows_stay_and_jobs_continue(empty: str, next_revision: str) -> None:
    make_first(empty)
    with open_store(empty) as store:
        assert store.revision() == next_revision
        jobs = store.jobs.newest()
        assert [job.state for job in reversed(jobs)] == list(JobState)
        for job in jobs:
            assert (job.submitter, job.queued, job.active_seconds) == ("", None, 1.5)
            trials = store.trials.of(job.id)
            assert [trial.outcome for trial in trials] == [Outcome.OK, None, None]
            assert trials[0].result is not None
            assert len(store.attempts.of(job.id)) == 2
            assert len(store.events.of(job.id)) == 1
        assert store.queue.claim(current_owner()) is None, "jobs that are not queued belong to who opened them"
        paused = next(job for job in jobs if job.state is JobState.PAUSED)
        store.queue.ask(paused.id, Ask.RESUME)
        lease = store.queue.claim(current_owner())
        assert lease is not None
        trial = store.trials.add(lease, TrialConfig(micro_batch_size=9), Purpose.SEARCH)
        assert (lease.job_id, trial.number) == (paused.id, 3)
        result = TrialResult(attempt=store.attempts.start(lease, 2).token, outcome=Outcome.OK)
        assert store.attempts.finish(lease, result)
        assert store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "").state is JobState.SUCCEEDED
    engine = sa.create_engine(empty.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert set(connection.scalars(sa.text("SELECT upgraded FROM jobs"))) == {True}
    engine.dispose()
