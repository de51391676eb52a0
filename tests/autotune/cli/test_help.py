"""The help of every command against its golden file, and what asking for help loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from called import COMMANDS, Command

from autotune.cli.overview import OVERVIEW

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"
SWEEPS = (
    "sweep", "show", "explain", "export", "reproduce", "space", "engines", "profile", "dry-run",
    "predict", "plan", "fit", "calibrate", "lint", "carry", "challenge", "cluster", "doctor", "clean", "weights",
)  # fmt: skip
JOBS = ("submit", "jobs", "watch", "pause", "resume", "stop", "cancel", "clone", "extend", "label", "share")
SERVICE = ("serve", "worker", "keys", "db", "study")


@pytest.mark.parametrize("name", ["", *SWEEPS, *JOBS, *SERVICE])
def test_help_is_golden(command: Command, name: str) -> None:
    """Write the files anew with AUTOTUNE_WRITE_GOLDEN=1."""
    answer = command(*filter(None, [name]), "--help")
    path = GOLDEN / f"help{'-' if name else ''}{name}.txt"
    if os.environ.get("AUTOTUNE_WRITE_GOLDEN"):
        path.write_text(answer.out, encoding="utf-8")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out == path.read_text(encoding="utf-8")


def test_every_command_has_an_example_that_exists() -> None:
    examples = [words.split() for group in OVERVIEW.values() for words in group.values()]
    assert sorted(words[1] for words in examples) == sorted({name.partition(" ")[0] for name in COMMANDS})
    for _, *words in examples:
        command = COMMANDS.get(" ".join(words[:2])) or COMMANDS[words[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, words


def test_without_a_command_help_comes_on_standard_error(command: Command) -> None:
    answer = command()
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == (GOLDEN / "help.txt").read_text(encoding="utf-8")


@pytest.mark.prove(every=7)
@pytest.mark.parametrize(
    "words", ["--help", "sweep --help", "submit --help", "profile --help", "--version", "engines", "engines --markdown"]
)
def test_help_loads_nothing_heavy(words: str) -> None:
    script = (
        "import atexit, sys\n"
        "heavy = ('torch', 'ray', 'sqlalchemy', 'optuna', 'fastapi', 'numpy', 'alembic')\n"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr))\n"
        "from autotune.cli import main\n"
        "main()\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, *words.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stderr.strip()) == (0, "[]")
    assert answer.stdout


@pytest.mark.prove
def test_completion_knows_commands_and_options(folder: Path) -> None:
    def completed(words: str, at: int) -> list[str]:
        environment = {
            "PYTHONPATH": str(ROOT),
            "_AUTOTUNE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(at),
        }
        answer = subprocess.run(
            [sys.executable, "-c", "from autotune.cli import main; main()"],
            env={**os.environ, **environment}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return answer.stdout.split()

    assert completed("autotune sw", 1) == ["sweep"]
    assert completed("autotune sweep --glo", 2) == ["--global-batch-size"]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("predict no-such-model --ranks 2", "autotune: no-such-model"),
        ("jobs --url http://127.0.0.1:1", "autotune: url: the client of a service needs httpx2, which is not installed; pip "),
    ],
)
def test_errors_are_one_line_without_httpx2(words: str, told: str, folder: Path) -> None:
    script = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('httpx2', 'httpcore2'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from autotune.cli import main\n"
        "main()\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, *words.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    (line,) = answer.stderr.splitlines()
    assert (answer.returncode, line[: len(told)]) == (2, told)
