"""What the proofs on a GPU have in common: how a claim is kept, how a trial is asked for, how two step times are compared."""

import math
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from executor.measurement.timing import student_t_975
from search_spaces.clusters import local_cluster
from search_spaces.model import ModelSpec
from search_spaces.trial import Fidelity, Interval, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

LOSS_BOUND = {"bf16": 2.0**-9, "fp32": 1e-4}
"""Relative, of three steps: other orders of the same sums, in bf16 a rounding of the loss. A CPU stays 50 times below."""


class Proof:
    """Collects what was shown; a claim that does not hold is kept, and told at the end."""

    def __init__(self, times: bool = True) -> None:
        """`times` off: on a small CPU run, where times say nothing, they are told and not claimed."""
        self.times = times
        self.lines: list[str] = []
        self.failed: list[str] = []

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def claim(self, holds: bool, line: str) -> None:
        self.say(f"- {'holds' if holds else 'FAILS'}: {line}")
        if not holds:
            self.failed.append(line)

    def claim_time(self, holds: bool, line: str) -> None:
        if self.times:
            self.claim(holds, line)
        else:
            self.say(f"- not claimed here: {line}")

    def attempt(self, name: str, show: Callable[[], None]) -> None:
        """Run one proof. What it raises is a claim that fails, and ends none of the others."""
        try:
            show()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            message = (str(error).splitlines() or [""])[0]
            self.claim(False, f"the proof {name!r} came to its end: {type(error).__name__}: {message[:300]}")


def request(
    name: str, model: ModelSpec, workload: Workload, ranks: int, fidelity: Fidelity | None = None, **knobs: Any
) -> TrialRequest:
    return TrialRequest(
        attempt=name,
        model=model,
        config=TrialConfig().replace(knobs),
        workload=workload,
        world_size=ranks,
        fidelity=fidelity or Fidelity(max_seconds=4.0),
        timeout_seconds=180.0 if ranks == 1 else 60.0,
        peak_flops_per_device=peak_flops(str(knobs.get("precision", "fp32"))),
    )


def peak_flops(precision: str) -> float | None:
    """Dense FLOP/s of the GPU here; None where there is none."""
    if not torch.cuda.is_available():
        return None
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return local_cluster(1, None, name, 1, memory).device.peak_flops.get(precision)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Geometric mean of the quotients of interleaved rounds with its 95 % interval, of their logarithms by Student's t."""
    logarithms = [math.log(above / below) for above, below in zip(numerators, denominators, strict=True)]
    mean, half = statistics.fmean(logarithms), math.inf
    if len(logarithms) > 1:
        half = student_t_975(len(logarithms) - 1) * statistics.stdev(logarithms) / math.sqrt(len(logarithms))
    return Interval(mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(min(mean + half, 700.0)))


def written(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
