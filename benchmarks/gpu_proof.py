"""What the proofs on a GPU have in common: an item of a part, its claims, how a trial is asked for, how times are compared."""

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_bundle import FOLDER, ROOT
from benchmarks.gpu_lines import Claim, Line, State, worst
from executor.measurement.timing import student_t_975
from executor.runners.local import LocalRunner
from executor.runners.transport import RUN_TRIAL
from search_spaces.clusters.presets import local_cluster
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Fidelity, Interval, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

LOSS_BOUND = {"bf16": 2.0**-9, "fp32": 1e-4}
"""Relative, of three steps: other orders of the same sums, in bf16 a rounding of the loss. A CPU stays 50 times below."""


@dataclass(kw_only=True)
class Setting:
    """Where items run, and what they share."""

    device: torch.device
    size: str
    """Of models: large or small."""
    folder: Path
    """For files of items, which a run that resumes finds again."""
    bundle: Path = FOLDER
    """Wheels of the command line."""
    known: Mapping[tuple[str, str], Line] = field(default_factory=dict)
    """(part, item) -> its result, of this run and of those that it resumes."""
    _runner: LocalRunner | None = field(default=None, init=False)
    _ranks: tuple[int, str] = field(default=(0, ""), init=False)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU: times are claimed there alone."""
        return self.device.type == "cuda"

    def ranks(self, count: int, trial_function: str = RUN_TRIAL) -> LocalRunner:
        """Warm ranks on the device; those of another kind are ended first, since they hold memory of it."""
        if self._runner is None or self._ranks != (count, trial_function):
            self.close()
            # Tiny models gain nothing from threads.
            threads = {} if self.size == "large" else {"OMP_NUM_THREADS": "1"}
            environment = {"PYTHONPATH": str(ROOT), **threads}
            self._runner = LocalRunner(count, device=self.device.type, environment=environment, trial_function=trial_function)
            self._ranks = count, trial_function
        return self._runner

    def free(self) -> None:
        """Give back what an item left on the device in this process."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End the ranks."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None


class Proof:
    """Collects what an item shows."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.claims: list[Claim] = []
        self.values: dict[str, Any] = {}

    @property
    def state(self) -> State:
        """Of all claims together."""
        return worst(claim.state for claim in self.claims)

    def tell(self, state: State, text: str) -> None:
        """Add a sentence."""
        self.claims.append(Claim(state=state, text=text))

    def claim(self, holds: bool, text: str) -> None:
        """A claim that needs no interval."""
        self.tell(State.HOLDS if holds else State.FAILS, text)

    def measured(self, text: str, **values: Any) -> None:
        """Figures of which nothing is claimed."""
        self.values |= values
        self.tell(State.MEASURED, text)

    def needs(self, part: str, item: str, *names: str) -> Mapping[str, Any] | None:
        """The figures of an earlier item. None, which is told as not run, where it lacks one of these names."""
        line = self.setting.known.get((part, item))
        if line is not None and all(name in line.values for name in names):
            return line.values
        self.tell(State.NOT_RUN, f"it needs what {part}/{item!r} has not found; run that again, with `--again fails`")
        return None

    def at_least(self, interval: Interval, bound: float, text: str) -> None:
        """A claim about times: that a ratio is at least `bound`. On a CPU, where small times say nothing, none is made."""
        told = f"{text}: {written(interval)}"
        if not self.setting.on_gpu:
            self.tell(State.MEASURED, f"{told} (nothing is claimed of times on a CPU)")
        else:
            self.tell(at_least(interval, bound), f"{told}, at least {bound:g} is claimed")


def at_least(interval: Interval, bound: float) -> State:
    """Whether a quantity is at least `bound`: decided where its whole interval says the same."""
    if interval.low >= bound:
        return State.HOLDS
    return State.FAILS if interval.high < bound else State.UNDECIDED


def at_most(interval: Interval, bound: float) -> State:
    """Whether a quantity is at most `bound`, likewise."""
    if interval.high <= bound:
        return State.HOLDS
    return State.FAILS if interval.low > bound else State.UNDECIDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The smallest thing that is run by itself: one line of results."""

    name: str
    show: Callable[[Proof], None]
    seconds: float
    """About what it takes with the large models on a GPU."""
    group: str = ""
    """Items that take about as long: what one took is expected of the next."""
    skipped: str = ""
    """Why this device cannot show it; empty: it can."""
    needs_device: bool = True
    """Whether its result is of the device. Otherwise one that any machine has found counts."""


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
        timeout_seconds=180.0,
        peak_flops_per_device=peak_flops(str(knobs.get("precision", "fp32"))),
    )


def peak_flops(precision: str) -> float | None:
    """Dense FLOP/s of the GPU here; None where there is none."""
    if not torch.cuda.is_available():
        return None
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return local_cluster(1, None, name, 1, memory).device.peak_flops.get(precision)


def why(result: TrialResult) -> str:
    """How a trial ended, in one line."""
    last = (result.traceback or "").strip().splitlines()[-1:]
    return f"{result.outcome} {result.message[:200]} {' '.join(last)[:200]}".rstrip()


def apart(ones: Sequence[float], others: Sequence[float]) -> float:
    """Largest relative difference of two series; infinite where one is missing or shorter."""
    if not ones or len(ones) != len(others):
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in zip(ones, others, strict=True))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Geometric mean of the quotients of interleaved rounds with its 95 % interval, of their logarithms by Student's t."""
    logarithms = [math.log(above / below) for above, below in zip(numerators, denominators, strict=True)]
    mean, half = statistics.fmean(logarithms), math.inf
    if len(logarithms) > 1:
        half = student_t_975(len(logarithms) - 1) * statistics.stdev(logarithms) / math.sqrt(len(logarithms))
    return Interval(mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(min(mean + half, 700.0)))


def written(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
