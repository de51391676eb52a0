"""The recipes of CONTRIBUTING.md, applied to a copy of the source as they are written."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from search_spaces.knob_values import KNOBS
from tests.documents import check_document

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("api", "autotune", "executor", "search_spaces", "storage")
MAIN = "from autotune.cli import main; main()"


def recipe(name: str) -> str:
    """The one block of CONTRIBUTING.md with this name."""
    (block,) = re.findall(rf"^```\w+ {name}\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)
    return str(block)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the source."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / "source" / package)  # with its compiled modules: they keep their dates
    return tmp_path / "source"


def insert(file: Path, anchor: str, text: str, after: bool) -> None:
    """Insert before or after the one line that is the anchor."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    (index, *_) = [index for index, line in enumerate(lines) if line.rstrip("\n") == anchor]
    lines.insert(index + after, text)
    file.write_text("".join(lines), encoding="utf-8")


def run(copy: Path, *words: str) -> str:
    """What `python` writes to standard output, with the copy."""
    environment = os.environ | {"PYTHONPATH": str(copy), "AUTOTUNE_DB": str(copy / "jobs.db"), "COLUMNS": "100"}
    ended = subprocess.run(
        [sys.executable, *words], cwd=copy.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    check_document(words[2:], ended.stdout)
    return ended.stdout


@pytest.mark.nightly
def test_add_a_knob(copy: Path) -> None:
    declaration = recipe("knob")
    assert f"number={max(knob.number for knob in KNOBS.values()) + 1}," in declaration
    knobs = copy / "search_spaces" / "knobs" / "computation.py"
    knobs.write_text(knobs.read_text(encoding="utf-8") + declaration, encoding="utf-8")
    insert(copy / "executor" / "trial" / "run.py", "    report = session.train_step()", recipe("engine"), after=True)

    assert "step_pause" in run(copy, "-c", MAIN, "space", "--knobs")
    page = run(copy, "-c", "from search_spaces.reference import knobs_page_markdown; print(knobs_page_markdown())")
    assert "| `step_pause` | Milliseconds that a rank waits after each step. |" in page
    words = (
        *(
            "-c",
            MAIN,
            "sweep",
            "llama-tiny",
            "--runner",
            "local",
            "--ranks",
            "1",
            "--strategy",
            "grid",
            "--confirm-repeats",
            "0",
        ),
        *("--global-batch-size", "2", "--sequence-length", "16", "--pin", "step_pause=0,50", "--pin", "micro_batch_size=1"),
        *("--pin", "zero_stage=0", "--trial-seconds", "0.5", "--json"),
    )
    assert "step_pause" not in json.loads(run(copy, *words))["best_config"]["best"]["config"]
    trials = json.loads(run(copy, "-c", MAIN, "show", "--json"))["trials"]
    speeds = {trial["config"].get("step_pause", 0): trial["result"]["samples_per_second"]["mean"] for trial in trials}
    assert speeds.keys() == {0, 50}
    assert speeds[50] < 2 / 0.05, "of two samples a step, with a pause of 50 ms after it"


@pytest.mark.prove
def test_add_a_request_field(copy: Path) -> None:
    insert(copy / "autotune" / "request" / "job_fields.py", "    note: str = request_field(", recipe("field"), after=False)

    helped = " ".join(run(copy, "-c", MAIN, "sweep", "--help").split())
    assert "--cool-down-seconds SECONDS Seconds between two trials, for machines that get hot." in helped
    document = json.loads(run(copy, "-m", "api.openapi"))
    field = document["components"]["schemas"]["JobSubmission"]["properties"]["cool_down_seconds"]
    assert {"type": "number", "minimum": 0.0} in field["anyOf"]
    refused = (
        "from autotune.errors import RequestError\nfrom autotune.request.request import JobRequest\n"
        "try: JobRequest(model='llama-tiny', cool_down_seconds=-1)\nexcept RequestError as error: print(error)"
    )
    assert run(copy, "-c", refused).startswith("cool_down_seconds")


def test_plug_ins_are_those_of_the_example() -> None:
    (metadata,) = (ROOT / "tests" / "plugin_example").glob("*.dist-info")
    shown = tomllib.loads(recipe("plugins"))["project"]["entry-points"]
    declared = {(point.group, point.name, point.value) for point in Distribution.at(metadata).entry_points}
    assert {(group, name, value) for group, points in shown.items() for name, value in points.items()} <= declared
