"""Common parts of the GPU proofs: items, their claims, requests of trials, comparisons of times."""

import gc
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bundle import FOLDER, ROOT
from benchmarks.gpu.lines import Claim, Line, State, worst
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.measurement.timing import student_t_975
from executor.runners.local import LocalRunner
from executor.runners.transport import RUN_TRIAL
from search_spaces.clusters.presets import local_cluster
from search_spaces.models.model import Model
from search_spaces.trial import Fidelity, Interval, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

LOSS_BOUND = {"bf16": 2.0**-9, "fp32": 1e-4}
"""Largest relative difference of three steps' losses: sums in another order, rounding in bf16. A CPU stays 50 times below."""


@dataclass(kw_only=True)
class Setting:
    """The device and files that items share."""

    device: torch.device
    size: str
    """Size of the models: large or small."""
    folder: Path
    """Folder of the items' files; a resumed run reuses them."""
    bundle: Path = FOLDER
    """Wheels of the command line."""
    known: Mapping[tuple[str, str], Line] = field(default_factory=dict)
    """(part, item) -> its result, from this run and the resumed ones."""
    _runner: LocalRunner | None = field(default=None, init=False)
    _ranks: tuple[int, str] = field(default=(0, ""), init=False)

    @property
    def card(self) -> str:
        """The name of the device, by which results of different devices are kept apart."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu and torch.cuda.is_available() else "the CPU"

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU: claims about times are made only there."""
        return self.device.type == "cuda"

    def ranks(self, count: int, trial_function: str = RUN_TRIAL) -> LocalRunner:
        """Warm ranks on the device. Ranks of another kind are ended first, since they hold device memory."""
        if self._runner is None or self._ranks != (count, trial_function):
            self.close()
            # Tiny models do not gain from threads.
            threads = {} if self.size == "large" else {"OMP_NUM_THREADS": "1"}
            environment = {"PYTHONPATH": str(ROOT), **threads}
            self._runner = LocalRunner(count, device=self.device.type, environment=environment, trial_function=trial_function)
            self._ranks = count, trial_function
        return self._runner

    def free(self) -> None:
        """Release the device memory that an item left in this process."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End the ranks."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None


class Proof:
    """Collects the claims and figures of an item."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.claims: list[Claim] = []
        self.values: dict[str, Any] = {}

    @property
    def state(self) -> State:
        """The worst state of all claims."""
        return worst(claim.state for claim in self.claims)

    def record(self, state: State, text: str) -> None:
        """Add a claim."""
        self.claims.append(Claim(state=state, text=text))

    def claim(self, holds: bool, text: str) -> None:
        """Record a claim that needs no interval."""
        self.record(State.HOLDS if holds else State.FAILS, text)

    def measured(self, text: str, **values: Any) -> None:
        """Record figures without a claim."""
        self.values |= values
        self.record(State.MEASURED, text)

    def needs(self, part: str, item: str, *names: str) -> Mapping[str, Any] | None:
        """The figures of an earlier item; None, recorded as not run, if one of these names is missing."""
        line = self.setting.known.get((part, item))
        if line is not None and all(name in line.values for name in names):
            return line.values
        self.record(State.NOT_RUN, f"it needs the missing result of {part}/{item!r}; run that again, with `--again fails`")
        return None

    def at_least(self, interval: Interval, bound: float, text: str) -> None:
        """Claim that a ratio of times is at least `bound`. On a CPU, where times are too small, only the figure is recorded."""
        figure = f"{text}: {written(interval)}"
        if not self.setting.on_gpu:
            self.record(State.MEASURED, f"{figure} (no claims about times on a CPU)")
        else:
            self.record(at_least(interval, bound), f"{figure}, at least {bound:g} is claimed")


def at_least(interval: Interval, bound: float) -> State:
    """Whether a quantity is at least `bound`; undecided if its interval contains values on both sides."""
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
    """The smallest unit that runs by itself: one line of results."""

    name: str
    show: Callable[[Proof], None]
    seconds: float
    """Estimated seconds with the large models on a GPU."""
    value: float = 0.0
    """Items of a part run by descending value, those of one value in the order in which they are listed."""
    deadline: float = 0.0
    """Seconds after which the item is abandoned; 0: by its estimate (`benchmarks.gpu.work`)."""
    group: str = ""
    """Items of a group take about the same time: one's time is the estimate for the next."""
    skipped: str = ""
    """Why the item cannot run on this device; empty: it can."""
    needs_device: bool = True
    """Whether its result depends on the device. Otherwise a result from any machine counts."""


def request(
    name: str, model: Model, workload: Workload, ranks: int, fidelity: Fidelity | None = None, **knobs: Any
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
    """Dense FLOP/s of the local GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return local_cluster(1, None, name, 1, memory).device.peak_flops.get(precision)


def why(result: TrialResult) -> str:
    """Outcome and message of a trial, in one line."""
    last = (result.traceback or "").strip().splitlines()[-1:]
    return f"{result.outcome} {_shortened(result.message)} {_shortened(' '.join(last))}".rstrip()


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 200, placeholder=" …")


def first_losses(device: torch.device, model: Model, config: TrialConfig, workload: Workload, steps: int) -> list[float]:
    """Losses of our engine's first steps, of one rank in this process."""
    session = NativeEngine().build(RankContext(rank=0, world_size=1, device=device), model, config, workload)
    try:
        losses = []
        for step in range(steps):
            session.prepare(step)
            loss = session.train_step().loss
            assert loss is not None
            losses.append(loss)
        return losses
    finally:
        session.close()


def apart(ones: Sequence[float], others: Sequence[float]) -> float:
    """Largest relative difference of two series; infinite if they are empty or differ in length."""
    if not ones or len(ones) != len(others):
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in zip(ones, others, strict=True))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Geometric mean of the ratios of interleaved rounds, with a 95 % interval by Student's t on their logarithms."""
    logarithms = [math.log(above / below) for above, below in zip(numerators, denominators, strict=True)]
    mean, half = statistics.fmean(logarithms), math.inf
    if len(logarithms) > 1:
        half = student_t_975(len(logarithms) - 1) * statistics.stdev(logarithms) / math.sqrt(len(logarithms))
    return Interval(mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(min(mean + half, 700.0)))


def written(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
