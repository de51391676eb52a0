"""Work of a step on device and host besides forward and backward: operations, waits, and overlap.

    python -m benchmarks.engines.update_counts [--markdown docs/results/update-counts.md]

A minute on two CPU ranks. Counts do not depend on the machine; a GPU starts one or a few kernels for each operation. Exit
status 1 if a count exceeds its bound.
"""

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common.gang import Gang
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.engines.update_counts_rank import CPU, LARGE, RANKS, SPEC, WORKLOAD, Step, work
from executor.engine import RankContext
from executor.engines.session import ParallelSession
from executor.measurement import device as device_module
from executor.trial import run as trial_module
from search_spaces.trial import Fidelity, TrialRequest
from search_spaces.trial_config import TrialConfig

STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration, and the bounds of its operations of reduction and update in one step."""

    name: str
    config: TrialConfig
    before: tuple[int, int]
    """Operations of reduction and update, by this command, when gradients and parameters were moved one by one."""
    bound: tuple[int, int]


CASES = (
    Case(
        name="stage 0, fp32", config=TrialConfig(micro_batch_size=4), before=(75, 22), bound=(8, 22),
    ),
    Case(
        name="stage 0, bf16", config=TrialConfig(micro_batch_size=4, precision="bf16"), before=(75, 172), bound=(8, 23),
    ),
    Case(
        name="stage 0, bf16, 4 micro-batches", config=TrialConfig(micro_batch_size=1, precision="bf16"),
        before=(300, 172), bound=(50, 23),
    ),
    Case(
        name="stage 0, bf16, not fused", config=TrialConfig(micro_batch_size=4, precision="bf16", fused_optimizer=False),
        before=(75, 180), bound=(8, 32),
    ),
    Case(
        name="stage 1, bf16, 4 micro-batches", config=TrialConfig(zero_stage=1, micro_batch_size=1, precision="bf16"),
        before=(301, 173), bound=(57, 24),
    ),
    Case(
        name="stage 1, bf16, 4 micro-batches, not contiguous",
        config=TrialConfig(zero_stage=1, micro_batch_size=1, precision="bf16", contiguous_gradients=False),
        before=(376, 173), bound=(302, 24),
    ),
    Case(
        name="stage 2, bf16, 4 micro-batches", config=TrialConfig(zero_stage=2, micro_batch_size=1, precision="bf16"),
        before=(307, 173), bound=(63, 24),
    ),
    Case(
        name="stage 3, bf16", config=TrialConfig(zero_stage=3, micro_batch_size=4, precision="bf16"),
        before=(76, 22), bound=(15, 22),
    ),
)  # fmt: skip
OVERLAPS = (0, 1, 2)
"""Stages whose reductions are counted with every knob at its default."""
OVERLAP_BEFORE = ("0 of 1", "0 of 1", "0 of 1")
WAITS_BEFORE = 16
INTRODUCTION = f"""# Operations and waits of reduction and update

Written by `make bench` (`benchmarks/engines/update_counts.py`). {SPEC.name} with {3 + 9 * SPEC.num_layers} parameters, on rank
0 of {RANKS} CPU ranks over gloo, in one step. *Reduction*: operations that move gradients out of `parameter.grad`, sum and send
them, over all micro-batches. *Update*: norm, clipping, optimizer, and the update of the parameters. Views and allocations do
not count. A fused or `foreach` operation is one operation here and a few kernels on a GPU. *Before*: the same command when
each gradient and each parameter was moved by separate operations. *CPU ms*: CPU time of both together in the fastest of ten
steps on this machine, without a bound."""
OVERLAP_TEXT = f"""{LARGE.name}, every knob at its default, {RANKS} ranks: reductions that begin before backward has ended. The
last one cannot: it contains the last gradients of backward. *Before*: a bucket held 500 million elements."""
WAITS_TEXT = f"""Host reads of device results while {STEPS} steps are timed on a device with its own clock (here replaced by
the host's clock)."""


class HostClock:
    """Replaces a device's clock by the host's."""

    def event(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self) -> None:
        """Nothing to wait for: everything is synchronous."""


def waits() -> int:
    """Number of host reads of device results, while `STEPS` steps are timed as on a GPU."""
    log: list[str] = []
    with ExitStack() as stack:
        if hasattr(device_module, "device_clock"):
            stack.enter_context(patch.object(device_module, "device_clock", lambda _: HostClock()))
            # As with short steps, also on a busy machine.
            stack.enter_context(patch.object(trial_module, "WINDOW_SECONDS", 1e6))
        run_step, timed = ParallelSession.run_step, trial_module._time_full

        def started(self: ParallelSession) -> Any:
            log.append("step")
            return run_step(self)

        def measured(*arguments: Any) -> Any:
            del log[:]
            return timed(*arguments)

        stack.enter_context(patch.object(ParallelSession, "run_step", started))
        stack.enter_context(patch.object(trial_module, "_time_full", measured))
        stack.enter_context(patch.object(torch.Tensor, "__float__", _logged_float(log)))
        fidelity = Fidelity(min_steps=STEPS, max_steps=STEPS, max_warmup_steps=2, measure_memory=False)
        config = TrialConfig(micro_batch_size=8)
        request = TrialRequest(attempt="1", model=SPEC, config=config, workload=WORKLOAD, world_size=1, fidelity=fidelity)
        trial_module.run_trial(RankContext(rank=0, world_size=1, device=CPU), request, lambda _: None)
    return sum(kind == "read" for kind, _ in itertools.groupby(log))


def _logged_float(log: list[str]) -> Callable[[torch.Tensor], float]:
    def read(value: torch.Tensor) -> float:
        log.append("read")
        return float(value.item())

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All counts."""

    steps: Sequence[Step]
    overlaps: Sequence[tuple[int, int]]
    waits: int


def counted() -> Found:
    """Count everything, on two ranks and in this process."""
    with Gang(RANKS, work) as gang:
        steps = [gang.run(("step", case.config))[0] for case in CASES]
        overlaps = [gang.run(("overlap", stage))[0] for stage in OVERLAPS]
    return Found(steps=steps, overlaps=overlaps, waits=waits())


def problems(found: Found) -> list[str]:
    """Counts above their bounds."""
    lines = []
    for case, step in zip(CASES, found.steps, strict=True):
        for kind, count, bound in zip(("reduction", "update"), (step.reducing, step.updating), case.bound, strict=True):
            if count > bound:
                lines.append(f"{case.name}: {count} operations of {kind}, bound {bound}")
    for stage, (every, beside) in zip(OVERLAPS, found.overlaps, strict=True):
        if beside < every - 1:
            lines.append(f"stage {stage}: {beside} of {every} reductions begin during backward")
    if found.waits > -(-STEPS // trial_module.WINDOW_STEPS):
        lines.append(f"{found.waits} waits in {STEPS} timed steps")
    return lines


def page(found: Found) -> list[str]:
    """Lines of markdown."""
    rows = [
        [
            case.name,
            str(case.before[0]),
            str(step.reducing),
            str(case.before[1]),
            str(step.updating),
            f"{1e3 * step.seconds:.1f}",
        ]
        for case, step in zip(CASES, found.steps, strict=True)
    ]
    overlaps = [
        [f"stage {stage}", str(before), f"{beside} of {every}"]
        for stage, before, (every, beside) in zip(OVERLAPS, OVERLAP_BEFORE, found.overlaps, strict=True)
    ]
    headings = ["configuration", "reduction, before", "reduction", "update, before", "update", "CPU ms"]
    return [
        *INTRODUCTION.splitlines(), "",
        *table(headings, rows), "",
        *OVERLAP_TEXT.splitlines(), "",
        *table(["", "before", "now"], overlaps), "",
        f"{WAITS_TEXT} Before: {WAITS_BEFORE}. Now: {found.waits}.",
        *(["", "Above their bounds:", "", *(f"- {problem}" for problem in problems(found))] if problems(found) else []),
    ]  # fmt: skip


def main() -> int:
    arguments = page_parser(__doc__).parse_args()
    found = counted()
    give(page(found), arguments.markdown)
    return 1 if problems(found) else 0


if __name__ == "__main__":
    sys.exit(main())
