"""A step of many micro-batches, or of a deep model, from steps of two smaller counts."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from executor.measurement.meter import Costs, sum_of_known
from search_spaces.fewer import at_full, fewer_micro_batches
from search_spaces.trial import CollectiveCount, TrialRequest


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

    def whole_at_full(self, first: int, second: int) -> int:
        """The same of what is counted, bytes too: no fewer than none, where a line that falls would end below."""
        growth, distance = (self.full - self.second) * (second - first), self.second - self.first
        return max(second + (2 * growth + distance) // (2 * distance), 0)

    def tags_at_full(self, first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
        """Bytes by tag."""
        return {tag: self.whole_at_full(first.get(tag, 0), size) for tag, size in second.items()}

    def collectives_at_full(
        self, first: Iterable[CollectiveCount], second: Iterable[CollectiveCount]
    ) -> tuple[CollectiveCount, ...]:
        """What a full step sends: sums over micro-batches, or layers, so that this is exact."""
        before = {(sent.operation, sent.mesh_dimension): (sent.count, sent.bytes) for sent in first}
        found = []
        for sent in second:
            count, size = before.get((sent.operation, sent.mesh_dimension), (0, 0))
            grown, bytes_grown = self.whole_at_full(count, sent.count), self.whole_at_full(size, sent.bytes)
            found.append(dataclasses.replace(sent, count=grown, bytes=bytes_grown))
        return tuple(found)

    def rises(self, first: Sequence[float], second: Sequence[float]) -> bool:
        """Whether more micro-batches took longer: where noise hides even that, nothing can be extrapolated."""
        return statistics.fmean(second) > statistics.fmean(first)

    def costs_at_full(self, first: Costs, second: Costs) -> Costs:
        """The costs of a full step."""
        # Of what is extrapolated no error is stated, so that nobody is blamed by it.
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
    """The line by which the request's steps are extrapolated; None: full steps are timed."""
    most = request.fidelity.most_micro_batches
    counts = fewer_micro_batches(request.config, request.workload, request.world_size, most)
    if counts is None:
        return None
    full = request.config.gradient_accumulation_steps(request.workload.global_batch_size, request.world_size)
    return Line(first=counts[0], second=counts[1], full=full)
