"""Starts the quick micro-benchmark of this machine's CPUs. Only its process imports torch."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from executor.errors import RunnerError
from executor.runners.rank_process import for_trials
from executor.runners.transport import LOOPBACK, thread_environment
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest, MicrobenchmarkResult
from search_spaces.plain import from_plain, to_plain

ROOT = str(Path(__file__).resolve().parents[2])
TIMEOUT_SECONDS = 15.0
"""On a machine that takes longer, the measurement would be meaningless."""


def measure_processors(world_size: int) -> MicrobenchmarkResult:
    """Measure with `world_size` ranks on this machine's CPUs, each with its share of the cores, as trials are run.

    Raises:
        RunnerError: the ranks did not start, failed, or took too long.
    """
    request = MicrobenchmarkRequest(attempt="quick", world_size=world_size, precisions=("fp32",), quick=True)
    threads = thread_environment(len(os.sched_getaffinity(0)), world_size)
    # As in rank_main, no module of the user is imported, whatever the working directory contains.
    code = f"import sys; sys.path.insert(0, {ROOT!r}); from executor.measurement.quick import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**for_trials(os.environ), **LOOPBACK, **threads},
        text=True,
        process_group=0,
    )
    try:
        output, errors = process.communicate(json.dumps(to_plain(request)), timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RunnerError(
            f"the quick micro-benchmark took more than {TIMEOUT_SECONDS:g} s; run `autotune calibrate`"
        ) from error
    finally:
        # The other ranks are in its process group; none may outlive it, however it ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        raise RunnerError(f"the quick micro-benchmark failed: {last}; run `autotune calibrate`")
    return from_plain(MicrobenchmarkResult, json.loads(output))
