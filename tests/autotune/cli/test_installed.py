"""What is not installed, in one line with what to type."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from called import Answer

from autotune import installed
from tests.ports import free_port

WITHOUT = "is needed for this, and is not part of autotune-client; pip install autotune-parallel"


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
    assert installed.install_line("postgresql") == "pip install 'autotune-parallel[postgresql]'"


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
        ("mcp", "mcp", "mcp: is not installed; pip install 'autotune-parallel[mcp]'"),
    ],
)
def test_a_command_that_lacks_a_module(folder: Path, words: str, module: str, line: str) -> None:
    assert _without(module, words) == Answer(2, "", f"autotune: {line}\n")


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("words", ["report x --format md", "explain x", "jobs"])
def test_a_client_of_a_service_needs_no_database(folder: Path, words: str) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    answer = _without("sqlalchemy", f"{words} --url {address}")
    assert (answer.status, answer.out) != (0, "") and f"url: {address} gives no answer" in answer.err


def test_a_client_without_a_service(folder: Path) -> None:
    line = "url: is missing, and this client reads no database; give --url, set AUTOTUNE_URL, or pip install autotune-parallel"
    assert _without("sqlalchemy", "jobs") == Answer(2, "", f"autotune: {line}\n")


def test_a_plan_without_what_reads_a_database(folder: Path) -> None:
    """AUTOTUNE_DB is set: a note says that its calibrations are not used."""
    answer = _without("sqlalchemy", "predict llama-tiny --cluster dgx-h100:1")
    assert (answer.status, answer.err) == (
        0,
        "note: calibrations of your database are not used: pip install autotune-parallel\n",
    )


def _without(module: str, words: str) -> Answer:
    """The answer of a process in which that module cannot be imported."""
    source = f"import sys; sys.modules[{module!r}] = None; from autotune.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", source, *words.split()], capture_output=True, text=True, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)
