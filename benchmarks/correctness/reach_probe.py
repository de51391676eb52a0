"""Writes which test reaches a probe, in any process of an environment: `benchmarks.correctness.mutants` installs it there.

A line of `reached.log` beside this file has the probe's number, whether it was reached in the process of pytest itself, and the
test that pytest was at, which processes that a test starts inherit; nothing after the second space: no test.
"""

import builtins
import os
import sys
from pathlib import Path

LOG = Path(__file__).with_name("reached.log")
_written: set[tuple[int, str]] = set()


def reached(probe: int) -> None:
    """Write a line, once for each test of this process."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (probe, test) in _written:
        return
    _written.add((probe, test))
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"{probe} {int('_pytest.runner' in sys.modules)} {test}\n")


builtins.reached_probe = reached  # type: ignore[attr-defined]
