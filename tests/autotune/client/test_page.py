"""The examples of docs/python.md, as they are written but for the port."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import served

from storage.store import Store

PAGE = (served.ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def example(language: str, url: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return str(text).replace("http://127.0.0.1:8000", url)


@pytest.mark.usefixtures("working")
@pytest.mark.nightly
def test_python(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example("python", url), "docs/python.md", "exec"), {})
    told = capsys.readouterr().out
    assert told.startswith("1 job_created \n2 job_acquired \n")
    assert " attempt_finished OK\n" in told
    assert '"zero_optimization"' in told


@pytest.mark.usefixtures("working")
@pytest.mark.nightly
def test_commands(url: str, store: Store, tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```\n(export .*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    script = 'autotune() { "${PYTHON[@]}" "$@"; }\n' + commands.replace("http://127.0.0.1:8000", url)
    python = " ".join(f"'{word}'" for word in served.COMMAND)
    environment = os.environ | {"PYTHONPATH": str(served.ROOT), "AUTOTUNE_DB": str(tmp_path / "none.db"), "NO_COLOR": "1"}
    script = f"PYTHON=({python})\n{script}"
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (job,) = store.jobs.newest()
    assert f"job {job.id}: queued, waits for a worker" in done.stderr
    assert "succeeded: 5 of 5 trials are spent" in done.stderr
    assert re.search(rf"{job.id}  succeeded  \S+ +5/5  \d\.\d\dx", done.stdout)
    assert "zero_optimization" in json.loads((tmp_path / "ds_config.json").read_text())
    assert not (tmp_path / "none.db").exists()
