"""The five lines of docs/service.md, as they are written but for the port."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "service.md"
COMMAND = [sys.executable, "-c", "import sys; from autotune.cli import main; sys.exit(main())"]
MEASURED = {
    "outcome": "OK", "losses": [5.0, 4.5], "step_seconds": [0.1] * 5, "within_relative_error": 0.01, "peak_memory_bytes": 10**6,
    "samples_per_second": {"mean": 80.0, "low": 79.0, "high": 81.0},
}  # fmt: skip


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The port of a server, beside which a worker answers trials from a table."""
    port = free_port()
    (tmp_path / "table.json").write_text(json.dumps({"*": MEASURED}))
    environment = os.environ | {"AUTOTUNE_DB": str(tmp_path / "jobs.db"), "PYTHONPATH": str(PAGE.parents[1])}
    started = [
        subprocess.Popen([*COMMAND, *arguments], env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL)
        for arguments in (["serve", "--no-worker", "--port", str(port)], ["worker", "--replay", "table.json"])
    ]
    try:
        until = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://localhost:{port}/readyz"):
                    break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.1)
        yield port
    finally:
        for process in started:
            process.terminate()
        assert [process.wait(60) for process in started] == [0, 0]


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_job_is_submitted_watched_and_exported(port: int, tmp_path: Path) -> None:
    (lines,) = re.findall(r"A job submitted, watched and exported:\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert lines.count("\n") == 5
    script = lines.replace("localhost:8000", f"localhost:{port}").replace("python3", sys.executable)
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "event: job_released" in done.stdout
    rate = json.loads((tmp_path / "best-config.json").read_text())["best"]["measured"]["samples_per_second"]
    assert rate["mean"] == pytest.approx(80.0, rel=0.01)
    assert json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"]["stage"] in (0, 1, 2, 3)
