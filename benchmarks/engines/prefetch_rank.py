"""A rank of `benchmarks/engines/prefetch.py`: runs the real trial, and counts stage 3's gathers from outside the engine."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from executor.engine import RankContext
from executor.engines.native.prefetch import ParameterGatherer
from executor.measurement.trial_report import gather_plain
from executor.trial import run as trial
from search_spaces.trial import TrialRequest, TrialResult

COUNTS = "prefetch"
"""Key of a result's environment; its value holds the counts as "field=number …"."""


@dataclass(slots=True)
class Counts:
    """Counts of one micro-batch, forward and backward, on a rank."""

    uses: int = 0
    """Modules that are about to compute with parameters which they have gathered."""
    in_flight: int = 0
    """Uses that compute while a gather is in flight."""
    waited: int = 0
    """Uses that waited for a parameter because it was not gathered ahead."""
    gathered: int = 0
    """Gathered elements."""
    gathered_on_use: int = 0
    """Gathered elements that a use waited for."""
    most_ahead: int = 0
    """Maximum of elements gathered ahead and not yet used."""


class Watch:
    """Tracks uses of parameters, and the gathers for each use."""

    def __init__(self) -> None:
        self.last = Counts()
        """Counts of the last finished micro-batch."""
        self._counts = Counts()
        self._ahead: dict[Hashable, int] = {}
        self._in_use: frozenset[Hashable] = frozenset()

    def use(self, parameters: Mapping[Hashable, int], fetch: Callable[[], object], in_flight: Callable[[], bool]) -> None:
        """Record a use. `parameters`: their elements; `fetch`: gathers them and others ahead; `in_flight`: whether any is."""
        counts, before = self._counts, self._counts.gathered_on_use
        self._in_use = frozenset(parameters)
        for parameter in parameters:
            self._ahead.pop(parameter, None)
        fetch()
        self._in_use = frozenset()
        counts.uses += 1
        counts.in_flight += in_flight()
        counts.waited += counts.gathered_on_use > before
        counts.most_ahead = max(counts.most_ahead, sum(self._ahead.values()))

    def gather(self, parameters: Mapping[Hashable, int]) -> None:
        """Record a gather: for the current use, or ahead."""
        for parameter, elements in parameters.items():
            self._counts.gathered += elements
            if parameter in self._in_use:
                self._counts.gathered_on_use += elements
            else:
                self._ahead[parameter] = elements

    def end(self) -> None:
        """Close the counts of a micro-batch."""
        if self._counts.uses:
            self.last = self._counts
        self._counts = Counts()
        self._ahead.clear()


WATCH = Watch()


def watch_native() -> None:
    """Count the gathers of our engine."""
    use, gather, end = ParameterGatherer._use, ParameterGatherer._gather, ParameterGatherer.end_window

    @functools.wraps(use)
    def counted_use(self: Any, unit: Any) -> None:
        sizes = {slot: slot.elements for slot in unit.slots}
        WATCH.use(sizes, lambda: use(self, unit), lambda: bool(self._pending))

    @functools.wraps(gather)
    def counted_gather(self: Any, slots: Any, near: bool) -> Any:
        WATCH.gather({slot: slot.elements for slot in slots})
        return gather(self, slots, near)

    @functools.wraps(end)
    def counted_end(self: Any) -> None:
        end(self)
        WATCH.end()

    ParameterGatherer._use = counted_use  # type: ignore[method-assign]
    ParameterGatherer._gather = counted_gather  # type: ignore[method-assign]
    ParameterGatherer.end_window = counted_end  # type: ignore[method-assign]


def watch_deepspeed() -> None:
    """Count the gathers of DeepSpeed's parameter coordinator. It fetches single modules: norms and linear layers."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as module  # type: ignore[import-not-found]

    coordinator, private = module.PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__"
    fetch, reset = coordinator.fetch_sub_module, coordinator.reset_step
    gather = getattr(coordinator, f"{private}all_gather_params_")

    @functools.wraps(fetch)
    def counted_fetch(self: Any, current_submodule: Any, forward: bool) -> None:
        leaf = module.z3_leaf_module(current_submodule)
        sizes = {p.ds_id: p.ds_numel for p in module.iter_params(current_submodule, recurse=leaf) if not p.ds_persist}
        if not sizes:
            fetch(self, current_submodule, forward)
            return
        registry = getattr(self, f"{private}inflight_param_registry")
        WATCH.use(sizes, lambda: fetch(self, current_submodule, forward), lambda: bool(registry))

    @functools.wraps(gather)
    def counted_gather(self: Any, params: Any, forward: bool, quantize: bool = False) -> None:
        absent = module.ZeroParamStatus.NOT_AVAILABLE
        WATCH.gather({p.ds_id: p.ds_numel for p in params if p.ds_status == absent})
        gather(self, params, forward, quantize)

    @functools.wraps(reset)
    def counted_reset(self: Any) -> None:
        reset(self)
        WATCH.end()

    coordinator.fetch_sub_module, coordinator.reset_step = counted_fetch, counted_reset
    setattr(coordinator, f"{private}all_gather_params_", counted_gather)


watch_native()


@functools.cache
def _watch_deepspeed_once() -> None:
    watch_deepspeed()


def run_trial(context: RankContext, request: TrialRequest, progress: Any) -> TrialResult:
    """Run the real trial; its result also has the counts of its last micro-batch.

    Raises:
        RuntimeError: the ranks counted differently.
    """
    if request.engine == "deepspeed" and importlib.util.find_spec("deepspeed"):
        _watch_deepspeed_once()
    WATCH.last = Counts()
    result = trial.run_trial(context, request, progress)
    found = gather_plain(context, dataclasses.asdict(WATCH.last))
    if any(counts != found[0] for counts in found):
        raise RuntimeError(f"ranks gathered differently: {found}")
    text = " ".join(f"{name}={number}" for name, number in found[0].items())
    return dataclasses.replace(result, environment=result.environment | {COUNTS: text})


def counts_of(result: TrialResult) -> Counts:
    """The counts of a trial."""
    pairs = (pair.split("=") for pair in result.environment[COUNTS].split())
    return Counts(**{name: int(number) for name, number in pairs})
