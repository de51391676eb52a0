"""What is not installed, in one line with what to type."""

import sys
from importlib import metadata
from typing import Any

import pytest
from called import Command

from autotune import installed

WITHOUT = "is needed for this, and is not part of autotune-client; pip install autotune"


@pytest.fixture
def only_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with the distribution autotune-client only."""
    found = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name == installed.WHOLE:
            raise metadata.PackageNotFoundError(name)
        return _Client() if name == installed.CLIENT else found(name)

    monkeypatch.setattr(metadata, "distribution", distribution)


class _Client(metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return "Name: autotune-client\nVersion: 1.2.3\nProvides-Extra: mcp\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


def test_the_version_of_either(only_client: None) -> None:
    assert installed.version() == "1.2.3"


def test_an_extra_of_either(only_client: None) -> None:
    assert installed.install_line("mcp") == "pip install 'autotune-client[mcp]'"
    assert installed.install_line("postgresql") == "pip install 'autotune[postgresql]'"


def test_a_module_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ModuleNotFoundError("No module named 'torch'", name="torch.nn")
    assert installed.missing_line(lacking) is None, "it is installed, so the module within is missing for another reason"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert installed.missing_line(lacking) == f"torch: {WITHOUT}"
    assert installed.missing_line(ModuleNotFoundError("No module named 'theirs'", name="theirs")) is None


@pytest.mark.parametrize(
    ("words", "module", "line"),
    [
        ("serve", "uvicorn", f"uvicorn: {WITHOUT}"),
        ("weights llama-tiny a.pt b.pt", "torch", f"torch: {WITHOUT}"),
        ("mcp", "mcp", "mcp: is not installed; pip install 'autotune[mcp]'"),
    ],
)
def test_a_command_that_lacks_a_module(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: str, module: str, line: str
) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("autotune.cli.serve_api", "autotune.agents", "executor.files.convert"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    answer = command(*words.split())
    assert (answer.status, answer.out, answer.err) == (2, "", f"autotune: {line}\n")


def test_a_client_without_a_service(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("autotune.cli.database_backend", "storage.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("sqlalchemy", "sqlalchemy.orm"):
        monkeypatch.setitem(sys.modules, name, None)
    answer = command("jobs")
    line = "url: is missing, and this client reads no database; give --url, set AUTOTUNE_URL, or pip install autotune"
    assert (answer.status, answer.err) == (2, f"autotune: {line}\n")


def test_a_plan_without_what_reads_a_database(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTOTUNE_DB is set: a note says that its calibrations are not used."""
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    answer = command("predict", "llama-tiny", "--cluster", "dgx-h100:1")
    assert (answer.status, answer.err) == (0, "note: calibrations of your database are not used: pip install autotune\n")
