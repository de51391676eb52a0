"""AdamW with moments in 8 bits as a kernel of Triton, by its interpreter on CPU tensors: the numbers of torch's operators."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which only CUDA builds of torch install")
def test_the_kernel_updates_weights_and_moments_as_the_operators_do() -> None:
    program = Path(__file__).with_name("interpreted_update.py")
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[4])}
    ended = subprocess.run([sys.executable, program], env=os.environ | variables, capture_output=True, text=True, check=False)
    assert not ended.returncode, ended.stderr
