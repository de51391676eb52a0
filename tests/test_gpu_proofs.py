"""`make gpu` skips where there is no GPU, and needs torch and the standard library alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"

ALONE = """
import importlib.abc, runpy, sys
class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "optuna", "sqlalchemy", "alembic", "fastapi", "typer", "rich", "platformdirs"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Forbid())
sys.argv = [SCRIPT, "--help"]
try:
    runpy.run_path(SCRIPT, run_name="__main__")
except SystemExit as ended:
    assert not ended.code
import executor.runners.local, executor.runners.rank_loop, executor.trial
"""


def test_imports_no_more_than_torch_and_the_standard_library() -> None:
    script = ALONE.replace("SCRIPT", repr(str(SCRIPT)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run `make gpu`")
def test_skips_with_a_reason_without_a_gpu() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: torch")
