"""A runner of several made-up nodes: some are slow, some fail whatever runs on them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import table

from executor.runners.replay import ReplayRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import RankMeasurement, TrialRequest, TrialResult

COMPUTE_SECONDS = 0.1
"""Of a step on a node that is not slow."""


class SeveralNodes(ReplayRunner):
    """Places each trial's ranks, one a node, on nodes in turn, without those that the request excludes."""

    def __init__(
        self,
        *nodes: str,
        slow: Mapping[str, float] | None = None,
        broken: Mapping[str, TrialResult] | None = None,
        answer: Any = table.measured,
        **changes: Any,
    ) -> None:
        """`slow`: node -> how many times as long it computes; `broken`: node -> what every trial on it ends with."""
        super().__init__(answer, **changes)
        self.nodes, self.slow, self.broken = nodes, dict(slow or {}), dict(broken or {})
        self.requests: list[TrialRequest] = []
        self.placed: list[tuple[str, ...]] = []
        self._turn = 0

    def node_capacities(self) -> Mapping[str, int]:
        return dict.fromkeys(self.nodes, 1)

    def submit(self, request: TrialRequest) -> str:
        self.requests.append(request)
        return super().submit(request)

    def _answer(self, request: TrialRequest) -> TrialResult:
        places = self._places(request)
        self.placed.append(places)
        failed = next((node for node in places if node in self.broken), None)
        if failed is not None:
            return dataclasses.replace(self.broken[failed], attempt=request.attempt, node=failed)
        result = super()._answer(request)
        if result.outcome is not Outcome.OK or result.samples_per_second is None:
            return result
        slowest = max(self.slow.get(node, 1.0) for node in places)
        rate = result.samples_per_second.mean / slowest
        measured = table.ok(rate, result.peak_memory_bytes or 0, attempt=request.attempt)
        ranks = tuple(self._rank(number, node) for number, node in enumerate(places))
        return dataclasses.replace(measured, ranks=ranks)

    def _places(self, request: TrialRequest) -> tuple[str, ...]:
        usable = [node for node in self.nodes if node not in request.excluded_nodes]
        assert len(usable) >= request.world_size, "the trial cannot be placed"
        self._turn += 1
        return tuple(usable[(self._turn + rank) % len(usable)] for rank in range(request.world_size))

    def _rank(self, number: int, node: str) -> RankMeasurement:
        return dataclasses.replace(
            table.rank(number, 1_000_000),
            node=node,
            compute_seconds_per_step=COMPUTE_SECONDS * self.slow.get(node, 1.0),
            wait_seconds_per_step=0.01,
            compute_relative_error=0.01,
        )
