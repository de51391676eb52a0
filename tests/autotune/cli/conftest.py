"""The command line called in this process: its exit status, its standard output, its standard error."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import table
import typer
from called import Answer, Command

from autotune.cli.app import run
from autotune.logs import CHATTY
from tests.documents import check_document


@pytest.fixture(scope="session", autouse=True)
def _commands_are_built_once() -> Iterator[None]:
    """A call builds the commands with all their options, which takes longer than most of them."""
    built = {"typer.main.get_command": typer.main.get_command}
    with contextlib.ExitStack() as stack:
        for name, build in built.items():
            stack.enter_context(patch(name, cache(build)))
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: empty but for `config.json`; the database is `jobs.db` in it."""
    (tmp_path / "config.json").write_text(table.MODEL_CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "jobs.db"))
    for name in ("AUTOTUNE_URL", "AUTOTUNE_API_KEY", "AUTOTUNE_RAY_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@contextlib.contextmanager
def logs_as_before() -> Iterator[None]:
    """Commands of processes that go on set up logs of their own, on a standard error that ends with the test."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    levels = {logger: logger.level for logger in (root, *map(logging.getLogger, CHATTY))}
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for logger, level in levels.items():
            logger.setLevel(level)


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls `autotune` with the words given."""

    def call(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["autotune", *map(str, words)])
        capsys.readouterr()
        with logs_as_before():
            status = run()
        told = capsys.readouterr()
        check_document(words, told.out)
        return Answer(status, told.out, told.err)

    return call
