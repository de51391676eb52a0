"""One case of the parity matrix with packages of kernels that stand in for the real ones, inside a rank."""

import importlib
import sys
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from benchmarks.correctness.parity_cases import Case
from benchmarks.correctness.parity_rank import Report, compare

STAND_INS = Path(__file__).with_name("stand_ins")
MODULES = {"liger": "liger_kernel.ops", "transformer_engine": "transformer_engine.pytorch"}
Calls = list[tuple[str, tuple[Tensor, ...]]]


def compare_by_stand_ins(rank: int, case: Case) -> tuple[Report, Calls]:
    """How the case differs from one process without kernels, and what the kernels were called with.

    The stand-ins compute in any type and on CPUs: what speaks against the real ones there is not asked.
    """
    if str(STAND_INS) not in sys.path:
        sys.path.insert(0, str(STAND_INS))
    calls: Calls = importlib.import_module(MODULES[case.config.fused_kernels]).CALLS
    calls.clear()
    with patch("executor.parallel.fused.kernel_refusals", return_value=[]):
        report = compare(rank, case)
    return report, [*calls]
