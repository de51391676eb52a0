"""A stand-in for `executor.trial.run.run_trial` that measures what a configuration's hash says, and hurts where it says so.

Rank processes import it by name from this folder; everything that it uses is imported at its top. What is measured, and which
configurations hurt in which way, follows from their hashes alone, so that two runs of one job can be compared.
"""

import contextlib
import os
import signal
import time
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist

from search_spaces.outcome import Outcome
from search_spaces.trial import Interval, Progress, TrialResult

FOLDER = "AUTOTUNE_CHAOS_FOLDER"
"""Names the folder in which first attempts are marked; where it is not set nothing but terminal faults happens."""
SECONDS = 0.3
"""What a trial takes."""
ERROR = 0.001
"""Relative, of a measurement."""
KINDS = 15
"""One configuration in so many has a fault of each kind: a third hurts."""


class Fault(StrEnum):
    """What a configuration does to its ranks."""

    NONE = "none"
    RAISES = "a rank raises"
    EXITS = "a rank exits"
    ALLOCATES = "a rank allocates past its limit"
    KILLED = "a rank is killed"
    """At the first attempt."""
    HANGS = "a rank hangs, the others in a collective"
    """At the first attempt."""

    @property
    def outcome(self) -> Outcome:
        """How the trial ends in the end."""
        ends = {Fault.RAISES: Outcome.FAILED, Fault.EXITS: Outcome.FAILED, Fault.ALLOCATES: Outcome.INFEASIBLE}
        return ends.get(self, Outcome.OK)

    @property
    def is_transient(self) -> bool:
        """Whether a second attempt goes well."""
        return self in (Fault.KILLED, Fault.HANGS)


_FAULTS = (Fault.RAISES, Fault.EXITS, Fault.ALLOCATES, Fault.KILLED, Fault.HANGS)


def fault_of(config_hash: str) -> Fault:
    """The fault of a configuration."""
    kind = int(config_hash[:8], 16) % KINDS
    return _FAULTS[kind] if kind < len(_FAULTS) else Fault.NONE


def rate_of(config_hash: str) -> float:
    """Samples/s of a configuration: from 50 to 150, no two alike but by chance."""
    return 50 + int(config_hash[8:16], 16) % 100_000 / 1_000


def run_trial(context, request, progress):
    """Hurt, or measure. Every rank takes part in collectives of both groups, so that a group that is not whole is noticed."""
    fault = fault_of(request.config.hash)
    progress(Progress(attempt=request.attempt, phase="build", step=0))
    last = context.rank == context.world_size - 1
    if last and fault is not Fault.NONE and (not fault.is_transient or _is_first(request.config.hash)):
        _hurt(fault)
    total = torch.ones(4)
    dist.all_reduce(total)
    if context.control_group is not None:
        dist.all_reduce(total, group=context.control_group)
    time.sleep(SECONDS)
    return _measured(request)


def _hurt(fault):
    match fault:
        case Fault.RAISES:
            raise LookupError("this configuration raises")
        case Fault.EXITS:
            os._exit(3)
        case Fault.ALLOCATES:
            torch.empty(2**60, dtype=torch.uint8)
        case Fault.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        case Fault.HANGS:
            time.sleep(3600)


def _is_first(config_hash):
    folder = os.environ.get(FOLDER)
    with contextlib.suppress(FileExistsError):
        if folder is not None:
            (Path(folder) / config_hash).touch(exist_ok=False)
            return True
    return False


def _measured(request):
    rate = rate_of(request.config.hash)
    return TrialResult(
        attempt=request.attempt,
        outcome=Outcome.OK,
        losses=(5.0, 4.5),
        step_seconds=(request.workload.global_batch_size / rate,) * 8,
        samples_per_second=Interval(mean=rate, low=rate * (1 - 2 * ERROR), high=rate * (1 + 2 * ERROR)),
        within_relative_error=ERROR,
        peak_memory_bytes=10**6,
        phase_seconds={"build": 0.0, "measure": SECONDS},
    )
