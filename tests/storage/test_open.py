"""Opening: what cannot be opened is told at once, in one line, with the remedy."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from storage.address import default_database_url, parse_address
from storage.database import Database
from storage.errors import DatabaseUnavailableError
from storage.store import open_store


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database that was opened and closed before."""
    path = tmp_path / "jobs.db"
    open_store(str(path)).close()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "folder"
    folder.mkdir()
    yield folder
    folder.chmod(0o755)


def test_new_files_know_where_long_values_end(database: Path) -> None:
    """Lists read the columns behind requests of up to a megabyte."""
    with closing(sqlite3.connect(database)) as other:
        assert other.execute("PRAGMA auto_vacuum").fetchone() == (2,)


def refusal(address: str | Path, busy_seconds: float = 0.2) -> str:
    with pytest.raises(DatabaseUnavailableError) as caught:
        open_store(str(address), busy_seconds)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, "no remedy"
    return message


def test_a_database_locked_by_another_is_refused_after_the_wait(database: Path) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert f"{database}: is locked by another process" in refusal(database)


def test_a_database_held_exclusively_is_refused_too(database: Path) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        assert "is locked by another process" in refusal(database)


def test_a_new_file_locked_before_its_first_use(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "new.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert "is locked by another process" in refusal(tmp_path / "new.db")


def test_a_lock_that_is_given_back_in_time_is_waited_for(database: Path) -> None:
    with closing(sqlite3.connect(database, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
        release.start()
        with open_store(str(database), busy_seconds=60) as store:
            store.jobs.create({})
        release.join()


def test_a_read_only_file(database: Path) -> None:
    database.chmod(0o444)
    assert f"{database}: is read-only; chmod u+w" in refusal(database)


def test_a_file_in_a_read_only_folder(folder: Path) -> None:
    open_store(str(folder / "jobs.db")).close()
    folder.chmod(0o555)
    assert f"{folder}: is read-only" in refusal(folder / "jobs.db")
    assert f"{folder}: is read-only" in refusal(folder / "new.db")


def test_a_read_only_file_behind_a_link(database: Path, folder: Path) -> None:
    (folder / "link.db").symlink_to(database)
    database.chmod(0o444)
    assert f"{database}: is read-only" in refusal(folder / "link.db")


def test_no_wait_is_spent_on_what_the_file_system_tells(database: Path) -> None:
    database.chmod(0o400)
    refusal(database, busy_seconds=1e9)


def test_a_folder(tmp_path: Path) -> None:
    assert f"{tmp_path}: is a folder" in refusal(tmp_path)


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    assert "mkdir -p" in refusal(tmp_path / "missing" / "jobs.db")


def test_a_file_in_the_place_of_the_folder(database: Path) -> None:
    assert "is not a folder" in refusal(database / "jobs.db")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database\n" * 200)
    assert "is not an SQLite database" in refusal(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "no database\n" * 200


def test_a_database_of_another_program(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE jobs (title TEXT)")
    assert "has tables of another program (jobs)" in refusal(tmp_path / "other.db")


@pytest.mark.parametrize("schema", ["0012", "r999"])
def test_an_unknown_schema(database: Path, schema: str) -> None:
    with closing(sqlite3.connect(database)) as other, other:
        other.execute("UPDATE autotune_version SET version_num = ?", (schema,))
    assert f"another version of autotune (schema {schema}" in refusal(database)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("mysql://host/name", "mysql databases are not supported"),
        ("nonsense://host/name", "nonsense databases are not supported"),
        ("://", "is not the address of a database"),
        ("", "names no file"),
        (":memory:", "names no file"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("postgresql+nosuch://host/name", "the address names a driver"),
    ],
)
def test_addresses_that_are_not_ours(address: str, message: str) -> None:
    assert message in refusal(address)


def test_passwords_are_not_shown() -> None:
    assert "secret" not in refusal("mysql://user:secret@host/name")


@pytest.mark.parametrize("name", ["plain.db", "with space?and#100%.db"])
def test_a_bare_path_is_a_file(tmp_path: Path, name: str) -> None:
    open_store(str(tmp_path / name)).close()
    assert (tmp_path / name).exists()


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///jobs.db") as store:
        store.close()
        monkeypatch.chdir(folder)
        store.jobs.create({})
    assert not list(folder.iterdir())


def test_the_default_is_a_file_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data ?"))
    open_store(default_database_url()).close()
    assert (tmp_path / "data ?" / "autotune" / "autotune.db").exists()


def test_the_environment_names_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", "postgresql://host/name")
    assert default_database_url() == "postgresql://host/name"


def test_a_data_folder_that_cannot_be_made(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(database))
    with pytest.raises(DatabaseUnavailableError, match="cannot be made"):
        default_database_url()


def test_a_lock_that_comes_later_is_told_the_same_way(database: Path) -> None:
    with (
        open_store(str(database), busy_seconds=0.2) as store,
        closing(sqlite3.connect(database, isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        assert store.jobs.newest() == []  # readers are not kept out
        with pytest.raises(DatabaseUnavailableError, match="is locked"):
            store.jobs.create({})
        other.execute("ROLLBACK")
        store.jobs.create({})


def test_threads_share_a_store(database: Path) -> None:
    with open_store(str(database)) as store:
        work: Callable[[], object] = lambda: [store.jobs.create({}) for _ in range(5)]  # noqa: E731
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.jobs.newest()) == 30


def test_connections_of_a_process_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.database.CONNECTIONS", 2)
    monkeypatch.setattr("storage.database.POOL_SECONDS", 0.05)
    database = Database(parse_address(str(tmp_path / "jobs.db")), busy_seconds=1.0)

    def nested(session: Session, depth: int) -> None:
        session.connection()
        if depth > 1:
            database.read(lambda inner: nested(inner, depth - 1))

    with pytest.raises(DatabaseUnavailableError, match="all 2 connections of this process"):
        database.read(lambda session: nested(session, 3))
    database.read(lambda session: nested(session, 2))
    database.close()


def test_a_read_that_is_interrupted_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C may come while a connection is given back to its pool, which would print where."""
    database = Database(parse_address(str(tmp_path / "jobs.db")), busy_seconds=1.0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    event.listen(database._engine, "reset", interrupt)
    with pytest.raises(KeyboardInterrupt):
        database.read(lambda session: session.execute(text("select 1")).scalar())
    assert caplog.records == []
