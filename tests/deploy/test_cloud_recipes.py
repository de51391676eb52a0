"""The recipes for SkyPilot and dstack: read by the parsers of those packages where they are installed; sound scripts."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from autotune.cli.app import app

DEPLOY = Path(__file__).parents[2] / "examples/deploy"
SKYPILOT, DSTACK = DEPLOY / "skypilot.yaml", DEPLOY / "sweep.dstack.yml"


def content(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text("utf-8")))


SCRIPTS = {
    "skypilot setup": content(SKYPILOT)["setup"],
    "skypilot run": content(SKYPILOT)["run"],
    "dstack": "\n".join(content(DSTACK)["commands"]),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_scripts_are_sound(script: str) -> None:
    subprocess.run(["bash", "-n", "-c", script], check=True)


@pytest.mark.parametrize("script", [SCRIPTS["skypilot run"], SCRIPTS["dstack"]], ids=["skypilot", "dstack"])
def test_their_sweep_is_one(script: str) -> None:
    (line,) = re.findall(r"autotune (sweep [^|]*)", script)
    words = shlex.split(line.replace("$OPTIONS", "--space 3d").replace("$MODEL", "llama-3-8b"))
    group = typer.main.get_command(app).build()  # type: ignore[attr-defined]
    with group.make_context("autotune", [], resilient_parsing=True) as parent:
        group.commands["sweep"].make_context("sweep", words[1:], parent=parent, resilient_parsing=False)
    assert {"head", "worker"} == set(re.findall(r"ray-node\.sh (\w+)", script))


def test_skypilot_reads_its_recipe() -> None:
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    task = sky.Task.from_yaml(str(SKYPILOT))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators) == (2, {"H100": 8})


def test_dstack_reads_its_recipe() -> None:
    models = pytest.importorskip("dstack._internal.core.models.configurations", reason="dstack is not installed")
    task = models.parse_run_configuration(content(DSTACK))
    assert (task.type, task.nodes, task.resources.gpu.count.min) == ("task", 2, 8)
