"""Monitors the nodes while a job runs: slow, lost and broken nodes are reported and avoided."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from autotune.loop.nodes import WORKED, Nodes, has_room
from executor.measurement.stragglers import slow_nodes
from executor.runners.runner import Runner
from search_spaces.failure import FailureRow, FailureTable
from search_spaces.trial import NodeEvent, TrialResult
from storage.records import AttemptState, Lease, TrialRecord
from storage.store import Store

QUARANTINE_SECONDS = 3600.0
"""How long all jobs of the database avoid a node: long enough to be noticed; it then ends without an operator."""
SLOW_REPEATS = 1
"""How often a trial is measured again on other nodes because a node slowed it down."""
EVENTS = {"lost": "node_lost", "added": "node_added", "slow": "node_slow", "shut": "node_shut"}
"""Kind of a runner's node event -> kind of the job's event. The store writes the event of a quarantine."""


class NodeMonitor:
    """Acts on what a job learns about its nodes. Each consequence is written before the attempt that caused it is closed.

    So if the process is killed in between, the attempt is repeated and no event is lost. If the runner has only one node, there
    is no alternative to it, and nothing is read or written.
    """

    def __init__(
        self,
        store: Store,
        lease: Callable[[], Lease],
        runner: Runner,
        ranks: int,
        table: FailureTable,
        own_rows: Sequence[FailureRow],
        report: Callable[[str], None],
    ) -> None:
        """`ranks`: number of ranks of a trial; `own_rows`: the table's rows from the request, which never put a node in
        quarantine for other jobs; `report` receives one-line messages for users.
        """
        self._own = frozenset(row.name for row in own_rows)
        self._faults = frozenset(row.name for row in table.rows if row.quarantine)
        self._store, self._lease, self._runner, self._ranks, self._report = store, lease, runner, ranks, report
        self._recalled: Nodes | None = None
        self._gone: set[str] = set()

    def excluded_nodes(self, trial: TrialRecord) -> tuple[str, ...]:
        """The nodes that the trial's next attempt must avoid."""
        capacities = self._runner.node_capacities()
        if len(capacities) < 2:
            return tuple(sorted(self._gone))
        excluded = self._nodes.excluded_nodes(trial.number, self._quarantined(), capacities, self._ranks)
        return tuple(sorted({*excluded, *self._gone}))

    def on_event(self, event: NodeEvent) -> None:
        """Handle an event of a node from the runner."""
        if event.kind == "added":
            self._gone.discard(event.node)
        elif event.kind == "lost":
            self._gone.add(event.node)
        elif event.kind == "slow":
            self._nodes.slow.add(event.node)
        if event.kind == "quarantined":
            self._quarantine(event.node, event.message)
        else:
            self._add_event(event)

    def judge(self, trial: TrialRecord, result: TrialResult, between: float) -> tuple[TrialResult, bool]:
        """Return the result with the nodes that slowed it down, and whether to repeat the trial on other nodes.

        `between`: the relative standard deviation between repeats of a trial.
        """
        if len(self._runner.node_capacities()) < 2:
            return result, False
        result = self._with_slow_nodes(trial, result, between)
        shut = set(self._nodes.shut)
        again = self._is_tried_elsewhere(trial, result) or self._is_measured_elsewhere(trial, result)
        for node in self._nodes.record(trial.number, result):
            strikes = len(self._nodes.strikes[node])
            self._quarantine(node, f"{strikes} trials in a row failed on it and succeeded elsewhere, last trial {trial.number}")
        if result.cause in self._faults - self._own and result.node is not None:
            self._quarantine(result.node, result.message)
        for node in self._nodes.shut - shut:
            self._add_event(NodeEvent(node=node, kind="shut", message=result.message), trial.number)
        return result, again

    @property
    def _nodes(self) -> Nodes:
        if self._recalled is None:
            self._recalled = Nodes(faults=self._faults, own=self._own)
            self._recalled.replay(self._store.attempts(self._lease().job_id))
        return self._recalled

    def _with_slow_nodes(self, trial: TrialRecord, result: TrialResult, between: float) -> TrialResult:
        found = slow_nodes(trial.config, result.ranks, between) if result.outcome in WORKED else []
        for event in found:
            self._add_event(event, trial.number)
        messages = [result.message, *(f"{event.node} is slow: {event.message}" for event in found)]
        message = "; ".join(text for text in messages if text)
        return dataclasses.replace(result, message=message, slow_nodes=tuple(event.node for event in found))

    def _is_tried_elsewhere(self, trial: TrialRecord, result: TrialResult) -> bool:
        suspect = self._nodes.is_suspect(trial.number, result)
        return suspect and result.node is not None and self._has_room_without({*self._quarantined(), result.node})

    def _is_measured_elsewhere(self, trial: TrialRecord, result: TrialResult) -> bool:
        """Whether to measure the trial on other nodes. If not, the result is kept; it lists the nodes that slowed it down."""
        if not result.slow_nodes:
            return False
        attempts = self._store.attempts(trial.job_id, trial.number)
        before = sum(one.state is AttemptState.RETRIED and one.outcome in WORKED for one in attempts)
        return before < SLOW_REPEATS and self._has_room_without({*self._quarantined(), *self._nodes.slow, *result.slow_nodes})

    def _has_room_without(self, nodes: Iterable[str]) -> bool:
        return has_room(self._runner.node_capacities(), {*nodes, *self._nodes.shut}, self._ranks)

    def _quarantined(self) -> list[str]:
        return [record.node for record in self._store.quarantined_nodes()]

    def _quarantine(self, node: str, reason: str) -> None:
        """Quarantine the node, unless a trial then has no room left: a job must be able to continue."""
        shut = self._quarantined()
        if node in shut or not self._has_room_without({*shut, node}):
            return
        self._store.quarantine_node(self._lease(), node, reason, QUARANTINE_SECONDS)
        self._report(f"{node} is in quarantine for {QUARANTINE_SECONDS / 60:.0f} minutes: {reason}")

    def _add_event(self, event: NodeEvent, trial: int | None = None) -> None:
        kind = EVENTS.get(event.kind)
        if kind is None:
            return
        about = {} if trial is None else {"trial": trial}
        self._store.add_event(self._lease(), kind, {"node": event.node, "message": event.message, **about})
        self._report(f"{event.node}: {event.kind}{f': {event.message}' if event.message else ''}")
