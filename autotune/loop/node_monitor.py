"""Monitors the nodes while a job runs. Slow, lost and broken nodes, derived from the job's attempts, are avoided."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.loop.trials import kind_of_failure
from executor.measurement.timing import node_of, slow_nodes
from executor.runners.runner import Runner
from search_spaces.failure import FailureRow, FailureTable
from search_spaces.outcome import Outcome
from search_spaces.trial import NodeEvent, TrialResult
from storage.records import AttemptRecord, AttemptState, Lease, TrialRecord
from storage.store import Store

STRIKES = 3
"""Consecutive trials that must fail on a node and succeed elsewhere before it is quarantined: one may be chance."""
WORKED = (Outcome.OK, Outcome.PRUNED)
"""Outcomes that show that the nodes of the ranks work."""


@dataclass(slots=True)
class Nodes:
    """Node states, derived from a job's attempts. The same attempts in the same order give the same state in every process."""

    faults: frozenset[str] = frozenset()
    """Names of the failure-table rows for faults of a node's hardware or driver, independent of the trial."""
    own_rows: frozenset[str] = frozenset()
    """Names of the request's own rows: their consequences for a node apply only to this job."""
    shut: set[str] = field(default_factory=set)
    """Nodes that get no further trial of this job, because of a row of its request."""
    worked: set[str] = field(default_factory=set)
    """Nodes on which a trial was measured."""
    slow: set[str] = field(default_factory=set)
    strikes: dict[str, set[int]] = field(default_factory=dict)
    """Node -> trials that failed on it and succeeded elsewhere since it last worked."""
    _failed_on: dict[int, dict[str, bool]] = field(default_factory=dict)
    """Trial -> the nodes it failed on, in order, and whether a row of the request was the cause: then it is no strike."""
    _errors: dict[tuple[str, str | None, str], set[str]] = field(default_factory=dict)
    """Kind of failure -> nodes where it occurred."""

    def replay(self, attempts: Iterable[AttemptRecord]) -> None:
        """Record earlier attempts."""
        for attempt in attempts:
            if attempt.result is not None:
                self.record(attempt.trial_number, attempt.result)

    def record(self, trial: int, result: TrialResult) -> list[str]:
        """Record the result of an attempt; return the nodes that reached `STRIKES` trials that succeeded elsewhere."""
        self.slow.update(result.slow_nodes)
        # The outcomes are those that a node may have caused.
        if result.outcome in (Outcome.FAILED, Outcome.LOST, Outcome.TIMEOUT) and result.node is not None:
            by_own_row = result.cause in self.own_rows
            self._failed_on.setdefault(trial, {})[result.node] = by_own_row
            if by_own_row and result.cause in self.faults:
                self.shut.add(result.node)
            self._errors.setdefault(kind_of_failure(result), set()).add(result.node)
        nodes = {node_of(rank) for rank in result.ranks}
        if result.outcome not in WORKED or not nodes:
            return []
        self.worked |= nodes
        for node in nodes:
            self.strikes.pop(node, None)
        elsewhere = [
            node for node, by_own_row in self._failed_on.pop(trial, {}).items() if node not in nodes and not by_own_row
        ]
        for node in elsewhere:
            self.strikes.setdefault(node, set()).add(trial)
        return [node for node in elsewhere if len(self.strikes[node]) >= STRIKES]

    def failed_nodes(self, trial: int) -> tuple[str, ...]:
        """The nodes that the trial failed on, if it has not succeeded since then."""
        return tuple(self._failed_on.get(trial, ()))

    def is_suspect(self, trial: int, result: TrialResult) -> bool:
        """Whether an error may be caused by the node and not by the configuration. Call it before `record`.

        This is so if the cause is a fault of a node, or if no trial ever worked on that node and no other node had this error.
        Such a trial is tried once on other nodes.
        """
        if result.outcome is not Outcome.FAILED or result.node is None or self.failed_nodes(trial):
            return False
        only_here = self._errors.get(kind_of_failure(result), set()) <= {result.node}
        return result.cause in self.faults or (only_here and result.node not in self.worked)

    def excluded_nodes(
        self, trial: int, quarantined: Iterable[str], capacities: Mapping[str, int], ranks: int
    ) -> tuple[str, ...]:
        """The nodes that the trial's next attempt should avoid, as long as its ranks fit on the remaining nodes.

        Priority: nodes in quarantine, nodes that are shut for this job, nodes that the trial failed on, slow nodes.
        """
        excluded: set[str] = set()
        for node in (*quarantined, *sorted(self.shut), *self.failed_nodes(trial), *sorted(self.slow)):
            if node in capacities and has_room(capacities, {*excluded, node}, ranks):
                excluded.add(node)
        return tuple(sorted(excluded))


def has_room(capacities: Mapping[str, int], without: Iterable[str], ranks: int) -> bool:
    """Whether `ranks` ranks can be placed without these nodes."""
    excluded = set(without)
    return sum(capacity for node, capacity in capacities.items() if node not in excluded) >= ranks


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
        self._own_rows = frozenset(row.name for row in own_rows)
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
        if result.cause in self._faults - self._own_rows and result.node is not None:
            self._quarantine(result.node, result.message)
        for node in self._nodes.shut - shut:
            self._add_event(NodeEvent(node=node, kind="shut", message=result.message), trial.number)
        return result, again

    @property
    def _nodes(self) -> Nodes:
        if self._recalled is None:
            self._recalled = Nodes(faults=self._faults, own_rows=self._own_rows)
            self._recalled.replay(self._store.attempts.of(self._lease().job_id))
        return self._recalled

    def _with_slow_nodes(self, trial: TrialRecord, result: TrialResult, between: float) -> TrialResult:
        events = slow_nodes(trial.config, result.ranks, between) if result.outcome in WORKED else []
        for event in events:
            self._add_event(event, trial.number)
        messages = [result.message, *(f"{event.node} is slow: {event.message}" for event in events)]
        message = "; ".join(text for text in messages if text)
        return dataclasses.replace(result, message=message, slow_nodes=tuple(event.node for event in events))

    def _is_tried_elsewhere(self, trial: TrialRecord, result: TrialResult) -> bool:
        suspect = self._nodes.is_suspect(trial.number, result)
        return suspect and result.node is not None and self._has_room_without({*self._quarantined(), result.node})

    def _is_measured_elsewhere(self, trial: TrialRecord, result: TrialResult) -> bool:
        """Whether to measure the trial on other nodes. If not, the result is kept; it lists the nodes that slowed it down."""
        if not result.slow_nodes:
            return False
        attempts = self._store.attempts.of(trial.job_id, trial.number)
        before = sum(attempt.state is AttemptState.RETRIED and attempt.outcome in WORKED for attempt in attempts)
        # A trial is measured again once because a node slowed it down.
        return before < 1 and self._has_room_without({*self._quarantined(), *self._nodes.slow, *result.slow_nodes})

    def _has_room_without(self, nodes: Iterable[str]) -> bool:
        return has_room(self._runner.node_capacities(), {*nodes, *self._nodes.shut}, self._ranks)

    def _quarantined(self) -> list[str]:
        return [record.node for record in self._store.nodes.quarantined()]

    def _quarantine(self, node: str, reason: str) -> None:
        """Quarantine the node, unless a trial then has no room left: a job must be able to continue."""
        shut = self._quarantined()
        if node in shut or not self._has_room_without({*shut, node}):
            return
        # How long all jobs of the database avoid a node: long enough to be noticed; it then ends without an operator.
        quarantine_seconds = 3600.0
        self._store.nodes.quarantine(self._lease(), node, reason, quarantine_seconds)
        self._report(f"{node} is in quarantine for {quarantine_seconds / 60:.0f} minutes: {reason}")

    def _add_event(self, event: NodeEvent, trial: int | None = None) -> None:
        # The store writes the event of a quarantine.
        kind = {"lost": "node_lost", "added": "node_added", "slow": "node_slow", "shut": "node_shut"}.get(event.kind)
        if kind is None:
            return
        about = {} if trial is None else {"trial": trial}
        self._store.events.add(self._lease(), kind, {"node": event.node, "message": event.message, **about})
        self._report(f"{event.node}: {event.kind}{f': {event.message}' if event.message else ''}")
