"""The profiler's trace of one step, as a file for Perfetto and Chrome."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import profile

from executor.measurement.device import counters_of


def trace_step(step: Callable[[], object], device: torch.device, path: Path) -> None:
    """Run `step` once under the profiler and write its trace, in a folder that is made if it does not exist.

    The trace has the operators with the shapes of their inputs, and on CUDA the kernels and copies too.
    Graphs that were captured before are slower afterwards (`account_step`), so this belongs after every measurement.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a list of activities: all that this build of torch supports. acc_events: as in account_step.
    with profile(record_shapes=True, acc_events=True) as recorder:
        step()
        counters_of(device).synchronize()
    recorder.export_chrome_trace(str(path))
