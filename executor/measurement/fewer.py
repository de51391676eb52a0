"""A step of many micro-batches, or of a deep model, from steps of two smaller counts."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from executor.measurement.meter import Costs, sum_of_known
from search_spaces.fewer import at_full, fewer_micro_batches
from search_spaces.trial import TrialRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a step takes grows by the same for every micro-batch, and for every layer: a line through two counts.

    What a step takes once (the last reduction, the update, filling a pipeline) is in both, and so is neither left out nor
    counted for every micro-batch, as it would be if the time of few were multiplied.
    """

    first: int
    second: int
    full: int
    """Micro-batches, or layers, of the step that is asked for; more than `second`."""

    def at_full(self, first: float, second: float) -> float:
        """The value at the full count, from those at the two."""
        return at_full(self.full, (self.first, self.second), first, second)

    def rises(self, first: Sequence[float], second: Sequence[float]) -> bool:
        """Whether more micro-batches took longer: where noise hides even that, nothing can be extrapolated."""
        return statistics.fmean(second) > statistics.fmean(first)

    def costs_at_full(self, first: Costs, second: Costs) -> Costs:
        """The costs of a full step. Collectives are sums over micro-batches, or layers, so that theirs are exact."""
        before = {(count.operation, count.mesh_dimension): count for count in first.collectives}
        collectives = []
        for count in second.collectives:
            less = before.get((count.operation, count.mesh_dimension), dataclasses.replace(count, count=0, bytes=0))
            grown, size = self.at_full(less.count, count.count), self.at_full(less.bytes, count.bytes)
            collectives.append(dataclasses.replace(count, count=round(grown), bytes=round(size)))
        devices = (first.device_seconds, second.device_seconds)
        return Costs(
            cpu_seconds=max(self.at_full(first.cpu_seconds, second.cpu_seconds), 0.0),
            device_seconds=None if devices[0] is None or devices[1] is None else self.at_full(devices[0], devices[1]),
            collectives=tuple(collectives),
            retries=sum_of_known((first.retries, second.retries)),
        )


def line_of(request: TrialRequest) -> Line | None:
    """The line by which the request's steps are extrapolated; None: full steps are timed."""
    most = request.fidelity.most_micro_batches
    counts = fewer_micro_batches(request.config, request.workload, request.world_size, most)
    if counts is None:
        return None
    full = request.config.gradient_accumulation_steps(request.workload.global_batch_size, request.world_size)
    return Line(first=counts[0], second=counts[1], full=full)
