"""`autotune db`: files that are whole or not there, and one line for what is wrong."""

import gzip
import json
import sqlite3
from pathlib import Path

import pytest
from called import Command

from search_spaces.outcome import JobState
from storage.leases import current_owner
from storage.records import Submission
from storage.store import open_store


@pytest.fixture
def job(folder: Path) -> str:
    with open_store(str(folder / "jobs.db")) as store:
        made = store.queue.submit({"model": "llama-tiny"}, Submission(submitter="anna"))[0]
        store.jobs.release(store.jobs.acquire(made.id, current_owner()), JobState.PAUSED, "", "")
    return made.id


def test_a_job_is_exported_and_imported(command: Command, folder: Path, job: str) -> None:
    out = folder / "job.jsonl"
    answer = command("db", "export", job[:12], "--db", "jobs.db", "--out", out)
    assert (answer.status, answer.out) == (0, "")
    assert f"wrote job {job} (4 rows)" in answer.err
    assert out.stat().st_mode & 0o077 == 0
    assert command("db", "import", out, "--db", "other.db").status == 0
    with open_store(str(folder / "other.db")) as store:
        assert store.jobs.get(job).state is JobState.PAUSED
    again = command("db", "import", out, "--db", "other.db")
    assert again.status == 2
    assert f"autotune clean {job} --yes" in again.err
    printed = command("db", "export", "--db", "jobs.db")
    assert printed.out.splitlines()[1:] == out.read_text().splitlines()[1:]  # the first line has the time


def test_a_backup_is_restored_packed_or_not(command: Command, folder: Path, job: str) -> None:
    assert command("db", "backup", "--db", "jobs.db", "--out", folder / "all.jsonl.gz").status == 0
    with gzip.open(folder / "all.jsonl.gz", "rt") as file:
        assert json.loads(file.readline())["kind"] == "database"
    assert command("db", "restore", folder / "all.jsonl.gz", "--db", "new.db").status == 0
    with open_store(str(folder / "new.db")) as store:
        assert [item.id for item in store.jobs.newest()] == [job]
    assert "has jobs already" in command("db", "restore", folder / "all.jsonl.gz", "--db", "new.db").err
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


@pytest.mark.prove
def test_no_command_prints_the_password(command: Command, folder: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"sqlite:///{folder}/jobs.db?password=hunter2"
    words = [
        ("resume", job),
        ("pause", job),
        ("resume", job),
        ("show", job),
        ("db", "check"),
        ("doctor",),
        ("doctor", "--json"),
    ]
    for line in words:
        answer = command(*line, "--db", address)
        assert "hunter2" not in answer.out + answer.err, line
    monkeypatch.setenv("AUTOTUNE_DB", address)
    assert f"database: sqlite:///{folder}/jobs.db?password=***" in command("doctor").out
    answer = command("sweep", "llama-tiny", "--knowledge", "postgresql://ann:hunter2@127.0.0.1:1/studies#s")
    assert answer.status == 2 and "postgresql://ann:***@127.0.0.1:1/studies" in answer.err


def test_prune_says_what_it_removed(command: Command, folder: Path, job: str) -> None:
    assert "removed 0 events" in command("db", "prune", "--days", "0", "--db", "jobs.db").err
    with open_store(str(folder / "jobs.db")) as store:
        store.jobs.release(store.jobs.acquire(job, current_owner()), JobState.SUCCEEDED, "", "")
    assert "removed 5 events" in command("db", "prune", "--days", "0", "--db", "jobs.db").err


def test_what_cannot_be_read_or_written_is_one_line(command: Command, folder: Path, job: str) -> None:
    (folder / "broken.gz").write_bytes(b"no gzip")
    for words, told in (
        (("db", "import", "nowhere.jsonl"), "file: nowhere.jsonl cannot be read"),
        (("db", "import", "broken.gz"), "file: broken.gz cannot be read"),
        (("db", "import", "jobs.db"), "cannot be read"),
        (("db", "backup", "--out", "nowhere/x.jsonl"), "out:"),
        (("db", "export", "20200101"), "there is no job"),
        (("db", "prune"), "days"),
    ):
        answer = command(*words, "--db", "jobs.db")
        assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1), answer.err
        assert told in answer.err


def test_a_job_from_a_file_is_whose_the_command_says(command: Command, folder: Path, job: str) -> None:
    command("db", "export", job, "--db", "jobs.db", "--out", "job.jsonl")
    assert command("db", "import", "job.jsonl", "--db", "other.db", "--owner", "berta").status == 0
    with open_store(str(folder / "other.db")) as store:
        assert store.jobs.get(job).submitter == "berta"
    backup = command("db", "restore", "job.jsonl", "--db", "third.db")
    assert backup.status == 2
    assert "autotune db import" in backup.err


@pytest.mark.prove
def test_damaged_rows_are_listed(command: Command, folder: Path, job: str) -> None:
    assert command("db", "check", "--db", "jobs.db").status == 0
    with open_store(str(folder / "jobs.db")) as store:
        newer = store.queue.submit({"model": "llama-tiny", "objective": "of a later version"}, Submission())[0].id
    with sqlite3.connect(folder / "jobs.db") as connection:
        connection.execute("UPDATE jobs SET request = '{' WHERE id = ?", (job,))
        connection.execute("UPDATE events SET payload = '[]' WHERE job_id = ?", (job,))
    damaged = command("db", "check", "--db", "jobs.db")
    assert damaged.status == 1
    lines = damaged.out.splitlines()
    assert f"jobs {job}: is damaged (request is not JSON)" in lines
    assert f"events {job}/1: is damaged (payload is list)" in lines
    assert any(line.startswith(f"jobs {newer}: ") and "cannot be read by this version" in line for line in lines)
    assert f"{len(lines)} rows are damaged" in damaged.err
    for name in (job, newer):
        assert command("clean", name, "--yes", "--db", "jobs.db").status == 0
    assert command("db", "check", "--db", "jobs.db").status == 0


def test_a_variable_to_be_passed_must_be_there(command: Command) -> None:
    answer = command("worker", "--db", "jobs.db", "--pass-environment", "NOT_SET_ANYWHERE")
    assert (answer.status, answer.err.count("\n")) == (2, 1)
    assert "NOT_SET_ANYWHERE is not set here" in answer.err
    assert command("worker", "--db", "jobs.db", "--pass-environment", "A=B").status == 2


def test_doctor_prints_no_secret(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("AUTOTUNE_API_KEY", "AUTOTUNE_SECRET_KEY", "HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY")
    for name in names:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("AUTOTUNE_URL", "http://anna:hunter2@127.0.0.1:9")
    for words in (("doctor",), ("doctor", "--json")):
        answer = command(*words)
        assert "hunter2" not in answer.out + answer.err
