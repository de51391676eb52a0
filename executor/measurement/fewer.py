"""Extrapolates a step of many micro-batches, or of a deep model, from steps of two smaller counts."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from executor.measurement.meter import Costs, sum_of_known
from search_spaces.training.fewer import at_full, fewer_micro_batches
from search_spaces.trial import CollectiveCount, TrialRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through two counts: the cost of a step grows by a constant for every micro-batch, and for every layer.

    Both steps include the fixed costs (the last reduction, the update, filling a pipeline). These are therefore neither omitted
    nor counted for every micro-batch, as they would be if the time of a short step were multiplied.
    """

    first: int
    second: int
    full: int
    """Micro-batches, or layers, of the requested step; more than `second`."""

    def at_full(self, first: float, second: float) -> float:
        """Return the value at the full count from the values at the two counts."""
        return at_full(self.full, (self.first, self.second), first, second)

    def whole_at_full(self, first: int, second: int) -> int:
        """Like `at_full` for integers such as counts and bytes, rounded; at least 0, even if the line falls below."""
        growth, distance = (self.full - self.second) * (second - first), self.second - self.first
        return max(second + (2 * growth + distance) // (2 * distance), 0)

    def tags_at_full(self, first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
        """Bytes by tag."""
        return {tag: self.whole_at_full(first.get(tag, 0), size) for tag, size in second.items()}

    def collectives_at_full(
        self, first: Iterable[CollectiveCount], second: Iterable[CollectiveCount]
    ) -> tuple[CollectiveCount, ...]:
        """Messages of a full step. They are sums over micro-batches, or layers, so this is exact."""
        before = {(sent.operation, sent.mesh_dimension): (sent.count, sent.bytes) for sent in first}
        counts = []
        for sent in second:
            count, size = before.get((sent.operation, sent.mesh_dimension), (0, 0))
            grown, bytes_grown = self.whole_at_full(count, sent.count), self.whole_at_full(size, sent.bytes)
            counts.append(dataclasses.replace(sent, count=grown, bytes=bytes_grown))
        return tuple(counts)

    def rises(self, first: Sequence[float], second: Sequence[float]) -> bool:
        """Whether the larger count took longer. If noise hides even that, nothing can be extrapolated."""
        return statistics.fmean(second) > statistics.fmean(first)

    def costs_at_full(self, first: Costs, second: Costs) -> Costs:
        """The costs of a full step."""
        # No error is given for extrapolated values, so that they cannot mark a node as slow.
        return Costs(
            cpu_seconds=max(self.at_full(first.cpu_seconds, second.cpu_seconds), 0.0),
            device_seconds=self._known(first.device_seconds, second.device_seconds),
            compute_seconds=self._known(first.compute_seconds, second.compute_seconds),
            wait_seconds=self._known(first.wait_seconds, second.wait_seconds),
            collectives=self.collectives_at_full(first.collectives, second.collectives),
            retries=sum_of_known((first.retries, second.retries)),
        )

    def _known(self, first: float | None, second: float | None) -> float | None:
        return None if first is None or second is None else self.at_full(first, second)


def line_of(request: TrialRequest) -> Line | None:
    """Return the line by which the request's steps are extrapolated; None: full steps are timed."""
    most = request.fidelity.most_micro_batches
    counts = fewer_micro_batches(request.config, request.workload, request.world_size, most)
    if counts is None:
        return None
    full = request.config.gradient_accumulation_steps(request.workload.global_batch_size, request.world_size)
    return Line(first=counts[0], second=counts[1], full=full)
