"""Profiles a model on one rank: tracks which module is active at each moment of a step, and the cost of every module."""

import bisect
import functools
import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

from executor.engine import EngineSession, RankContext, measured_config
from executor.errors import RunnerError
from executor.measurement.device import counters_of, environment
from executor.measurement.flop_counter import FlopCounter
from executor.measurement.flops import ModelProfile, ModuleCost, Phases
from executor.trial.run import ENGINES, closed_at_end
from search_spaces.trial import Progress, TrialRequest


class Phase(StrEnum):
    """The kind of work that is being done."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OUTSIDE = "outside"
    """No module is active: the step is before forward, between forward and backward, or after backward."""
    PROFILER = "profiler"
    """The step is paused while the tracker installs its hooks."""


class ModulePhase(NamedTuple):
    """The active module and its phase."""

    module: int | None
    """Index into the model's `named_modules`."""
    phase: Phase


OUTSIDE = ModulePhase(None, Phase.OUTSIDE)


class ModuleTracker:
    """A context manager around a step that calls `moved` at each change of module or phase, at the moment of the change.

    1. **Forward.** Hooks surround every module's call: a module is active from its call to its return, except during the calls
       inside it. The first module that is called is the model.
    2. **Owners of backward nodes.** autograd numbers its nodes in the order in which forward creates them, so the number at
       each change of module or phase shows which module created a node. The graph's nodes get a hook when the model returns.
    3. **Backward.** From the start of a node on, the module that created it is active, until a node of another module starts.
       So each moment of backward belongs to one module, without gaps or overlaps. The accumulation and the reduction of
       parameter gradients have no number; they belong to the module whose node ran just before.
    4. **Recompute.** A module that is called while backward runs is being recomputed. What a checkpointed block does between
       the calls inside it cannot be distinguished from the backward work for which it runs.

    The tracker adds nothing to the graph, so results do not change. Used from one thread (and autograd's thread on its behalf).
    """

    def __init__(self, moved: Callable[[ModulePhase], None]) -> None:
        self.module_phase = OUTSIDE
        self.modules: list[tuple[str, nn.Module]] = []
        self.calls: list[int] = []
        self._moved = moved
        self._indices: dict[nn.Module, int] = {}
        self._before: list[ModulePhase] = []
        self._numbers: list[int] = []
        self._makers: list[int | None] = []
        self._handles: list[Any] = []
        self._in_backward = False

    def __enter__(self) -> "ModuleTracker":
        # always_call, because a checkpoint that has recomputed enough leaves the recomputed modules by an exception.
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _move(self, module_phase: ModulePhase) -> None:
        if module_phase != self.module_phase:
            self.module_phase = module_phase
            self._moved(module_phase)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if not self._indices:
            self.modules = list(module.named_modules())
            self._indices = {inner: index for index, (_, inner) in enumerate(self.modules)}
            self.calls = [0] * len(self.modules)
        index = self._indices.get(module)
        if index is None:
            return
        self._before.append(self.module_phase)
        if torch._C._current_graph_task_id() != -1:
            self._move(ModulePhase(index, Phase.RECOMPUTE))
            return
        self.calls[index] += 1
        self._note_maker(index)
        self._move(ModulePhase(index, Phase.FORWARD))

    def _leave_module(self, module: nn.Module, _: Any, output: Any) -> None:
        index = self._indices.get(module)
        if index is None:
            return
        before = self._before.pop()
        if self.module_phase.phase is Phase.FORWARD:
            self._note_maker(before.module)
            if index == 0:
                self._move(ModulePhase(None, Phase.PROFILER))
                self._hook_graph(output)
        self._move(before)

    def _note_maker(self, index: int | None) -> None:
        """Record that this module creates the nodes that are numbered from now on."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._makers.append(index)

    def _hook_graph(self, output: Any) -> None:
        """Hook every node that the model's call has created, then clear the record of node numbers."""
        waiting = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
        hooked: set[Node] = set()
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            # Outside the range are parameter nodes, which have the highest possible number, and nodes of earlier calls.
            if node in hooked or not self._numbers[0] <= number < self._numbers[-1]:
                continue
            hooked.add(node)
            maker = self._makers[bisect.bisect_right(self._numbers, number) - 1]
            node.register_prehook(functools.partial(self._enter_backward, maker))
            waiting += [parent for parent, _ in node.next_functions if parent is not None]
        self._numbers.clear()
        self._makers.clear()

    def _enter_backward(self, module: int | None, _: tuple[Tensor, ...]) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._leave_backward)
        self._move(ModulePhase(module, Phase.BACKWARD))

    def _leave_backward(self) -> None:
        self._in_backward = False
        self._move(OUTSIDE)


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output: in tuples, lists and dicts, and the `.loss` of an object."""
    leaves = (leaf if isinstance(leaf, Tensor) else getattr(leaf, "loss", None) for leaf in tree_leaves(output))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class ModuleClock:
    """Records the time at each change of module or phase; on CUDA by stream events: the device's time, not the host's.

    If the device waits for the host, the wait belongs to the module in which the host was late.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[ModulePhase, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """Start a step, outside the model."""
        self._marks.clear()
        self.move(OUTSIDE)

    def move(self, module_phase: ModulePhase) -> None:
        """Record that the step continues at `module_phase`."""
        self._marks.append((module_phase, self._now()))

    def stop(self) -> dict[ModulePhase, float]:
        """End the step. Return the seconds of each module and phase; their sum is the step's."""
        self.move(OUTSIDE)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: defaultdict[ModulePhase, float] = defaultdict(float)
        for (module_phase, began), (_, ended) in itertools.pairwise(self._marks):
            seconds[module_phase] += _between(began, ended)
        return dict(seconds)

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(began: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    """Return the seconds between two marks of the same device."""
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert not isinstance(ended, float)
    return float(began.elapsed_time(ended)) / 1e3


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
