"""The pre-commit hook and the GitHub action: their declared commands, run on good and faulty recipes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lint_recipes import RECIPES

from tests.sampling import sampled

ROOT = Path(__file__).parents[3]
GOOD, FAULTY = RECIPES / "titan-llama3-8b.toml", RECIPES / "titan-global-batch.toml"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which `autotune` is this working tree's."""
    program = tmp_path / "bin" / "autotune"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; from autotune.cli import main; sys.exit(main())" "$@"\n'
    )
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


def hook() -> dict[str, Any]:
    (declared,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    return dict(declared)


@pytest.mark.nightly
def test_the_hook_by_its_declared_entry(environment: dict[str, str]) -> None:
    words = shlex.split(hook()["entry"])
    for files, status in (([GOOD], 0), ([GOOD, FAULTY], 0), ([RECIPES / "titan-misspelled.toml", GOOD], 1)):
        found = subprocess.run([*words, *map(str, files)], env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == status, found.stdout + found.stderr
    # Without the ranks, a global batch is not checked: a hook reports what the file alone shows.


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("torchtitan/models/llama3/train_configs/llama3_8b.toml", True), ("ds_config.json", True), ("a/ds_z.json", True),
        ("configs/accelerate_config.yaml", True), ("recipes/train.sh", True), ("pyproject.toml", False), ("a.json", False),
        ("setup.sh", False),
    ],
)  # fmt: skip
def test_the_files_of_the_hook(path: str, taken: bool) -> None:
    assert bool(re.search(hook()["files"], path)) is taken


@pytest.mark.prove
@pytest.mark.parametrize(("file", "status"), sampled([(FAULTY, 1), (GOOD, 0)], every=2), ids=["faulty", "good"])
def test_the_command_of_the_action(tmp_path: Path, environment: dict[str, str], file: Path, status: int) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    inputs = {name: declared.get("default", "") for name, declared in action["inputs"].items()}
    inputs |= {"files": str(file), "cluster": "dgx-h100:1"}
    install, lint = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite" and "pip install" in install["run"]
    given = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: inputs[found[1]], text) for name, text in lint["env"].items()
    }
    assert not any("${{" in text for text in given.values())
    found = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", lint["run"]],  # as GitHub runs `shell: bash`
        env={**environment, **given}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == status, found.stdout + found.stderr
    log = json.loads((tmp_path / inputs["sarif"]).read_text())
    assert len(log["runs"][0]["results"]) == status
