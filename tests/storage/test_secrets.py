"""Secrets are encrypted in the database, with a key that is not in it; files are for their owner alone."""

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from storage.address import default_database_url, readable_by_others
from storage.errors import SecretError
from storage.private_files import make_private_file, write_private
from storage.secret_box import FILE_VARIABLE, KEYS_VARIABLE
from storage.store import Store, open_store


@pytest.fixture(autouse=True)
def _no_keys_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def rows(address: str) -> str:
    engine = sa.create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        found = repr(connection.execute(sa.text("SELECT * FROM webhooks")).all())
    engine.dispose()
    return found


def test_the_database_does_not_tell_a_secret(store: Store, address: str) -> None:
    made = store.webhooks.create("anna", "https://a.example/")
    assert made.secret.startswith("whsec_")
    assert made.secret not in rows(address)
    (kept,) = store.webhooks.of("anna")
    assert store.webhooks.signing_secret(kept) == made.secret


def test_two_who_make_the_key_at_once_have_the_same(tmp_path: Path) -> None:
    (tmp_path / f".key.{os.getpid()}").touch()  # as a process of this number in another container, or a crash, leaves it
    write_private(tmp_path / "key", "first")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "key", "second")
    assert (tmp_path / "key").read_text() == "first"
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"key", f".key.{os.getpid()}"}


def test_the_key_is_in_a_file_of_its_own_for_its_owner_alone(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "jobs.db")) as store:
        assert not (tmp_path / "jobs.db.key").exists(), "it is made when it is needed"
        store.webhooks.create("anna", "https://a.example/")
    assert stat.S_IMODE((tmp_path / "jobs.db.key").stat().st_mode) == 0o600


def test_keys_of_the_environment_are_used_and_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    file = str(tmp_path / "jobs.db")
    monkeypatch.setenv(KEYS_VARIABLE, old)
    with open_store(file) as store:
        made = store.webhooks.create("anna", "https://a.example/")
    monkeypatch.setenv(KEYS_VARIABLE, f"{new},{old}")
    with open_store(file) as store:
        assert store.webhooks.signing_secret(store.webhooks.of()[0]) == made.secret
    (tmp_path / "keys").write_text(f"{new}\n")
    monkeypatch.delenv(KEYS_VARIABLE)
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "keys"))
    with open_store(file) as store, pytest.raises(SecretError, match="encrypted with another key") as refused:
        store.webhooks.signing_secret(store.webhooks.of()[0])
    assert new not in str(refused.value)
    assert not (tmp_path / "jobs.db.key").exists()


@pytest.mark.parametrize("text", ["", "no key", "ä"])
def test_a_file_without_a_key_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "keys"))
    with open_store(str(tmp_path / "jobs.db")) as store, pytest.raises(SecretError, match=r"generate_key|AUTOTUNE_SECRET_KEY"):
        store.webhooks.create("anna", "https://a.example/")


def test_a_database_file_and_its_journals_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        with open_store(str(tmp_path / "jobs.db")) as store:
            store.jobs.create({"model": "m"})
            reader = sqlite3.connect(tmp_path / "jobs.db")  # holds the journals until it closes
            files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("jobs.db*")}
            reader.close()
    finally:
        os.umask(before)
    assert files == dict.fromkeys(("jobs.db", "jobs.db-wal", "jobs.db-shm"), 0o600)


def test_the_folder_of_the_default_database_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_DB", raising=False)
    default_database_url()
    assert stat.S_IMODE((tmp_path / "data" / "autotune").stat().st_mode) == 0o700


def test_a_file_that_others_can_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "jobs.db"
    assert readable_by_others(str(file)) is None
    open_store(str(file)).close()
    assert readable_by_others(str(file)) is None
    file.chmod(0o644)
    assert readable_by_others(f"sqlite:///{file}") == file
    assert readable_by_others("postgresql://ann@host/jobs") is None


def test_a_database_that_is_opened_twice_keeps_its_locks(tmp_path: Path) -> None:
    """Whoever closes a file of their own process ends its locks: another process would then write beside it."""
    file = tmp_path / "jobs.db"
    with open_store(str(file)) as store:
        first = sqlite3.connect(file, isolation_level=None)
        first.execute("BEGIN IMMEDIATE")
        make_private_file(file)
        code = f"import sqlite3; sqlite3.connect({str(file)!r}, timeout=0, isolation_level=None).execute('BEGIN IMMEDIATE')"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        first.close()
        assert "locked" in other.stderr
        assert store.jobs.newest() == []
