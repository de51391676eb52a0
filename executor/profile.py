"""Profiles a model on one rank: the cost of every module in an optimizer step."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from executor.engine import EngineSession, RankContext, measured_config
from executor.errors import RunnerError
from executor.measurement.device import counters_of
from executor.measurement.environment import environment
from executor.measurement.flop_counter import FlopCounter
from executor.measurement.module_profile import ModelProfile, ModuleCost, Phases
from executor.measurement.module_tracker import OUTSIDE, ModuleClock, ModulePhase, ModuleTracker, Phase
from executor.trial.run import ENGINES, closed_at_end
from search_spaces.trial import Progress, TrialRequest


@dataclass(slots=True)
class _ProfiledSteps:
    """Runs the steps of a session one after the other."""

    session: EngineSession
    device: torch.device
    done: int = 0

    def prepare(self) -> None:
        """Load the next step's data."""
        self.session.prepare(self.done)
        self.done += 1

    def run(self) -> float:
        """Run the step and wait until the device has finished. Returns its seconds."""
        began = time.perf_counter()
        self.session.train_step()
        counters_of(self.device).synchronize()
        return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class _CountedStep:
    """What was counted in the step that ran under the FLOP counter."""

    modules: list[tuple[str, nn.Module]]
    calls: list[int]
    flops: Mapping[ModulePhase, int]


def run_profile(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> ModelProfile:
    """Profile an optimizer step of a model that is not sharded.

    1. Build the model with the request's engine, as a trial does, and warm up.
    2. Count the FLOPs of one step by module.
    3. Time steps alternately with and without the tracker's hooks: at least `fidelity.min_steps` of each, and further ones
       until `fidelity.max_seconds` have passed.
    4. Take the median of each module's own seconds in each phase, so that a module's total is the sum over the modules inside.

    Raises:
        EngineRefusalError: the engine refuses the combination.
        FactoryError, DataError: the user's module or text cannot be used.
        RunnerError: the step calls no module, or its FLOPs cannot be counted.
    """
    del progress  # a profile ends before its progress would be read
    config = measured_config(request.config).replace({"cuda_graphs": False})  # a replayed graph calls no module
    session = ENGINES[request.engine].build(context, request.model, config, request.workload)
    with closed_at_end(context, session):
        steps = _ProfiledSteps(session, context.device)
        while not session.settled() or steps.done < request.fidelity.warmup_updates:
            steps.prepare()
            steps.run()
        counted = _count(steps)
        plain, hooked = _time(steps, request)
        return _profile(counted, plain, hooked, environment(context.device))


def _count(steps: _ProfiledSteps) -> _CountedStep:
    """Run one step and attribute every operator's FLOPs to the module that runs it."""
    flops: Counter[ModulePhase] = Counter()
    tracker = ModuleTracker(lambda _: None)

    def observe(count: int) -> None:
        module, phase = tracker.module_phase
        # Backward runs with gradients disabled. What runs with gradients enabled is a recomputed forward, even between calls.
        again = phase is Phase.BACKWARD and torch.is_grad_enabled()
        flops[ModulePhase(module, Phase.RECOMPUTE if again else phase)] += count

    steps.prepare()
    with tracker, FlopCounter(observe) as counter:
        steps.run()
    if not tracker.modules:
        raise RunnerError("the step called no module; profile a model whose step calls its module")
    if counter.total is None:
        raise RunnerError("an operator of the step has no FLOPs formula for its shapes; profile a model without it")
    return _CountedStep(tracker.modules, tracker.calls, flops)


def _time(steps: _ProfiledSteps, request: TrialRequest) -> tuple[list[float], list[dict[ModulePhase, float]]]:
    """Return the seconds of steps without hooks and, by module and phase, of steps with hooks. They alternate, so that the
    load of the machine affects both alike."""
    clock = ModuleClock(steps.device)
    plain: list[float] = []
    hooked: list[dict[ModulePhase, float]] = []
    until = time.monotonic() + request.fidelity.max_seconds
    while len(plain) < request.fidelity.min_steps or (time.monotonic() < until and len(plain) < request.fidelity.max_steps):
        steps.prepare()
        plain.append(steps.run())
        steps.prepare()
        with ModuleTracker(clock.move):
            clock.start()
            steps.run()
            hooked.append(clock.stop())
    return plain, hooked


def _profile(
    counted: _CountedStep, plain: Sequence[float], hooked: Sequence[Mapping[ModulePhase, float]], versions: dict[str, str]
) -> ModelProfile:
    module_phases = {key for step in hooked for key in step if key.phase is not Phase.PROFILER}
    seconds = {key: statistics.median(step.get(key, 0.0) for step in hooked) for key in module_phases}
    owners = _owned_parameters(counted.modules)
    modules = tuple(
        ModuleCost(
            name=name,
            kind=type(module).__name__,
            calls=counted.calls[index],
            parameters=owners[index],
            flops=_phases(index, counted.flops),
            seconds=_phases(index, seconds),
        )
        for index, (name, module) in enumerate(counted.modules)
    )
    return ModelProfile(
        modules=modules,
        outside_flops=counted.flops.get(OUTSIDE, 0),
        outside_seconds=seconds.get(OUTSIDE, 0.0),
        micro_batches=counted.calls[0],
        step_seconds=statistics.median(plain),
        hooked_seconds=sum(seconds.values()),
        repeats=len(plain),
        environment=versions,
    )


def _phases(module: int, figures: Mapping[ModulePhase, float]) -> Phases:
    return Phases(
        forward=figures.get(ModulePhase(module, Phase.FORWARD), 0.0),
        backward=figures.get(ModulePhase(module, Phase.BACKWARD), 0.0),
        recompute=figures.get(ModulePhase(module, Phase.RECOMPUTE), 0.0),
    )


def _owned_parameters(modules: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """Return the elements of each module's own parameters. A shared parameter counts for the first module that has it."""
    counted: set[nn.Parameter] = set()
    counts = []
    for _, module in modules:
        parameters = [parameter for parameter in module.parameters(recurse=False) if parameter not in counted]
        counted.update(parameters)
        counts.append(sum(parameter.numel() for parameter in parameters))
    return counts
