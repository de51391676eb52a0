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
    (index,) = [index for index, line in enumerate(lines) if line.rstrip("\n") == anchor]
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
    page = run(copy, "-c", "from autotune.cli.engines import knobs_page_markdown; print(knobs_page_markdown())")
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


def predicted(copy: Path, model: str, *words: str) -> float:
    """Predicted bytes of one card with samples of 64 tokens."""
    command = ("predict", model, "--cluster", "1xh100", "--global-batch-size", "2", "--sequence-length", "64", "--json", *words)
    (rank,) = json.loads(run(copy, "-c", MAIN, *command))["predicted"]["peak_memory_bytes"]
    return float(rank["total"] - rank["by_tag"]["reserved"])


ONE_TRIAL = (
    "--runner", "local", "--ranks", "1", "--strategy", "grid", "--confirm-repeats", "0", "--global-batch-size", "2",
    "--sequence-length", "16", "--pin", "micro_batch_size=1", "--pin", "zero_stage=0", "--trial-seconds", "0.5", "--json",
)  # fmt: skip


@pytest.mark.prove
def test_add_a_knob_that_costs_memory(copy: Path) -> None:
    knobs = copy / "search_spaces" / "knobs" / "computation.py"
    knobs.write_text(knobs.read_text(encoding="utf-8") + recipe("memory-knob"), encoding="utf-8")
    equations, session = copy / "autotune" / "prediction" / "equations", copy / "executor" / "engines" / "session.py"
    rounding = "    rounding_bytes: Array = field(default_factory=lambda: np.zeros(1))"
    insert(equations / "cases.py", rounding, recipe("memory-field"), after=False)
    insert(equations / "memory.py", "        + standing", recipe("memory-equation"), after=False)
    insert(session, "        self._prepared = self.accumulation", recipe("memory-engine"), after=True)
    insert(session, "            yield from replica.tagged_storages()", recipe("memory-account"), after=True)

    without, with_reserve = (predicted(copy, "llama-tiny", "--pin", f"reserved_mib={mib}") for mib in (0, 64))
    assert with_reserve - without == 64 * 2**20
    run(copy, "-c", MAIN, "sweep", "llama-tiny", *ONE_TRIAL, "--pin", "reserved_mib=0,64")
    trials = json.loads(run(copy, "-c", MAIN, "show", "--json"))["trials"]
    peaks = {trial["config"].get("reserved_mib", 0): trial["result"]["peak_memory_bytes"] for trial in trials}
    assert peaks[64] - peaks[0] == 64 * 2**20


@pytest.mark.prove
def test_add_a_model_family_with_a_new_block(copy: Path) -> None:
    models = copy / "search_spaces" / "models"
    insert(models / "huggingface.py", '    "gpt2": _gpt2,', recipe("family"), after=True)
    model, old = models / "model.py", 'ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", CLAMPED)\n'
    text = model.read_text(encoding="utf-8")
    assert text.count(old) == 1
    model.write_text(text.replace(old, recipe("activations")), encoding="utf-8")
    insert(copy / "executor" / "parallel" / "operators.py", '            case "gelu_tanh":', recipe("block"), after=False)

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}
    config = copy / "config.json"
    config.write_text(json.dumps({"model_type": "squared", "max_position_embeddings": 64, **sizes}), encoding="utf-8")
    assert predicted(copy, str(config)) > 0
    best = json.loads(run(copy, "-c", MAIN, "sweep", str(config), *ONE_TRIAL))["best_config"]
    assert best["model"]["spec"]["activation"] == "relu_squared"
    computed = (
        "import torch; from executor.parallel.operators import Operators\n"
        "print(Operators().activate(torch.tensor([-1.0, 3.0]), 'relu_squared').tolist())"
    )
    assert run(copy, "-c", computed).split() == ["[0.0,", "9.0]"]


@pytest.mark.prove
def test_add_an_attention_kernel(copy: Path) -> None:
    kernels, attention = copy / "search_spaces" / "kernels.py", copy / "executor" / "parallel" / "attention.py"
    insert(kernels, '        "cudnn": AttentionKernel(precisions=HALF_PRECISIONS),', recipe("kernel"), after=True)
    insert(attention, '    "cudnn": torch.backends.cuda.enable_cudnn_sdp,', recipe("switch"), after=True)

    fused, scores = (predicted(copy, "llama-tiny", "--pin", f"attention_backend={name}") for name in ("cudnn", "sliced"))
    assert scores > fused
    assert "sliced" in run(copy, "-c", MAIN, "space", "--knobs")


@pytest.mark.prove
def test_add_a_request_field(copy: Path) -> None:
    insert(copy / "autotune" / "request" / "job_fields.py", "    note: str = request_field(", recipe("field"), after=False)

    helped = " ".join(run(copy, "-c", MAIN, "sweep", "--help").split())
    assert "--cool-down-seconds SECONDS Seconds between two trials, for machines that get hot." in helped
    document = json.loads(run(copy, "-m", "api.reference"))
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
