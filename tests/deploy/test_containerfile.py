"""The container file, parsed: its instructions, what it copies, what it pins."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples/deploy/Containerfile"
INSTRUCTIONS = frozenset({"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "VOLUME", "ENTRYPOINT", "CMD"})
"""Those that a file like this has a use for."""


def parsed() -> list[tuple[str, str]]:
    """(instruction, its words), continued lines joined."""
    lines = [line for line in FILE.read_text("utf-8").splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def test_every_line_is_an_instruction_and_the_first_names_an_image() -> None:
    found = parsed()
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    for name, rest in found:
        if name == "FROM":
            image = rest.split()[0]
            assert "/" in image and ":" in image and not image.endswith(":latest"), "name a registry and a tag"


def test_what_is_copied_is_there_and_the_wheel_gets_every_package() -> None:
    copied: set[str] = set()
    stages = {rest.split()[-1] for name, rest in parsed() if name == "FROM" and " AS " in rest}
    for name, rest in parsed():
        if name != "COPY":
            continue
        words = shlex.split(rest)
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            copied.add(source)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages <= copied
    assert {"pyproject.toml", "locks/container.txt", "README.md", "LICENSE"} <= copied


@pytest.mark.parametrize("word", ["tini", "wget", "iproute2", "bash"])
def test_what_scripts_and_probes_need_is_installed(word: str) -> None:
    (install,) = (rest for name, rest in parsed() if name == "RUN" and "apt-get install" in rest)
    assert word in install.split()
    assert "--no-install-recommends" in install and "rm -rf /var/lib/apt/lists" in install


def test_it_runs_as_no_root_with_pinned_versions_and_a_reaper() -> None:
    found = parsed()
    users = [rest for name, rest in found if name == "USER"]
    assert users and users[-1] not in ("root", "0")
    for name, rest in found:
        if name == "RUN" and "pip install" in rest:
            for command in rest.split("&&"):
                assert "pip install" not in command or "--require-hashes" in command or "--no-deps" in command, command
    assert ("ENTRYPOINT", '["tini", "-g", "--"]') in found
