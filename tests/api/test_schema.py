"""The service holds what its OpenAPI document promises: `schema_proofs.py`, in a process of its own.

Its requests are made while it is collected, which takes long, and each of several processes of tests collects every module.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROOFS = Path(__file__).with_name("schema_proofs.py")


@pytest.mark.fuzz
@pytest.mark.nightly
def test_every_operation_is_answered_as_the_document_says() -> None:
    chosen = [] if "AUTOTUNE_FUZZ_EXAMPLES" in os.environ else ["-m", "not nightly"]
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", str(PROOFS), *chosen], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
