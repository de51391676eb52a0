"""Plug-ins of every kind, in a distribution of their own: found, used by a sweep, and harmless where they are broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import check_document

EXAMPLE = Path(__file__).resolve().parents[1] / "plugin_example"
ROOT = Path(__file__).resolve().parents[2]
MAIN = "from autotune.cli import main; main()"


def run(folder: Path, *words: str, path: Path = EXAMPLE, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process that has the distribution at `path`."""
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "AUTOTUNE_DB": str(folder / "jobs.db"), **variables}
    answer = subprocess.run(
        [sys.executable, "-c", MAIN, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    check_document(words, answer.stdout)
    return answer


@pytest.mark.prove
def test_a_sweep_uses_a_knob_a_rule_an_engine_a_strategy_and_a_tracker(tmp_path: Path) -> None:
    words = (
        *("sweep", "llama-tiny", "--engine", "example", "--strategy", "last-first", "--runner", "local", "--ranks", "1"),
        *("--trials", "2", "--confirm-repeats", "0", "--global-batch-size", "2", "--sequence-length", "16"),
        *("--pin", "step_pause=0,200", "--pin", "micro_batch_size=1", "--trial-seconds", "0.5", "--tracker", "lines", "--json"),
    )
    swept = run(tmp_path, *words, EXAMPLE_TRACKER=str(tmp_path / "trials.txt"))
    assert swept.returncode == 0, swept.stderr
    document = json.loads(swept.stdout)["best_config"]
    assert document["engine"] == "example"
    assert "step_pause" not in document["best"]["config"], "a pause of 0 is the fastest, and a default is not stored"
    tracked = (tmp_path / "trials.txt").read_text().splitlines()
    shown = json.loads(run(tmp_path, "show", "--json").stdout)["trials"]
    trials = [[str(trial["number"]), trial["outcome"]] for trial in shown]
    assert [line.split()[1:] for line in tracked] == [*trials, ["-1", "2", "trials"]]
    pauses = {trial["config"].get("step_pause", 0) for trial in shown}
    assert pauses == {0, 200}

    odd = run(tmp_path, *words[:-1], "--pin", "sequence_parallel=false", "--config", str(_odd(tmp_path)))
    assert odd.returncode == 2
    assert "step-pause-even" in odd.stderr


def _odd(folder: Path) -> Path:
    file = folder / "odd.json"
    file.write_text('{"step_pause": 3}')
    config = folder / "odd.toml"
    config.write_text("[baseline]\nstep_pause = 3\n")
    return config


@pytest.mark.nightly
def test_an_export_and_an_import(tmp_path: Path) -> None:
    (tmp_path / "flags.json").write_text('{"flags": {"micro_batch_size": 2}}')
    words = (
        *("sweep", "llama-tiny", "--engine", "example", "--runner", "local", "--ranks", "1", "--trials", "1"),
        *("--from", "flags.json", "--confirm-repeats", "0", "--global-batch-size", "2", "--sequence-length", "16"),
        *("--trial-seconds", "0.5", "--json"),
    )
    swept = run(tmp_path, *words)
    assert swept.returncode == 0, swept.stderr
    exported = run(tmp_path, "export", "--format", "flags")
    assert exported.stdout == "micro_batch_size=2\n", exported.stderr


def test_a_broken_plug_in_is_named_with_the_remedy(tmp_path: Path) -> None:
    metadata = tmp_path / "site" / "broken-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[autotune.strategies]\nmissing = not_there:Strategy\n")
    words = ("sweep", "llama-tiny", "--strategy", "missing", "--runner", "local", "--trials", "1")
    refused = run(tmp_path, *words, path=tmp_path / "site")
    assert refused.returncode == 2
    line = refused.stderr.strip().splitlines()[-1]
    assert "plug-in missing: not_there:Strategy of broken cannot be loaded" in line
    assert line.endswith("repair or uninstall it, or set AUTOTUNE_PLUGINS=none")


@pytest.mark.prove
@pytest.mark.parametrize("plugins", ["", "none"])
def test_they_can_be_left_out(tmp_path: Path, plugins: str) -> None:
    listed = run(tmp_path, "space", "--knobs", AUTOTUNE_PLUGINS=plugins)
    assert listed.returncode == 0, listed.stderr
    assert ("step_pause" in listed.stdout) == (plugins != "none")
    described = run(tmp_path, "sweep", "--help", AUTOTUNE_PLUGINS=plugins, COLUMNS="200")
    assert ("last-first" in described.stdout) == (plugins != "none")
