"""The engine against one process: a part of the matrix that `make parity` runs whole (docs/parity.md)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARITY = Path(__file__).parents[4] / "benchmarks" / "parity.py"


@pytest.mark.parametrize(("ranks", "every"), [(2, 5), (4, 17)])
def test_losses_and_weights_equal_one_process(ranks: int, every: int) -> None:
    """Odd strides go through every stage, bucket setting, model, accumulation, clipping and checkpointing in turn."""
    command = [sys.executable, str(PARITY), "--ranks", str(ranks), "--every", str(every)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else dict(os.environ)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    passed, failed = done.stdout.splitlines()[-1].split(", ")
    assert failed == "0 failed"
    assert int(passed.split()[0]) > 30
