"""What a job knows about its nodes. Everything is derived from its attempts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autotune.loop.failure_causes import kind_of_failure
from executor.measurement.stragglers import node_of
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from storage.records import AttemptRecord

STRIKES = 3
"""Consecutive trials that must fail on a node and succeed elsewhere before it is quarantined: one may be chance."""
WORKED = (Outcome.OK, Outcome.PRUNED)
"""Outcomes that show that the nodes of the ranks work."""
BROKE = (Outcome.FAILED, Outcome.LOST, Outcome.TIMEOUT)
"""Outcomes that a node may have caused."""


@dataclass(slots=True)
class Nodes:
    """Node states, derived from a job's attempts. The same attempts in the same order give the same state in every process."""

    faults: frozenset[str] = frozenset()
    """Names of the failure-table rows for faults of a node's hardware or driver, independent of the trial."""
    own: frozenset[str] = frozenset()
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
        if result.outcome in BROKE and result.node is not None:
            own = result.cause in self.own
            self._failed_on.setdefault(trial, {})[result.node] = own
            if own and result.cause in self.faults:
                self.shut.add(result.node)
            self._errors.setdefault(kind_of_failure(result), set()).add(result.node)
        here = {node_of(rank) for rank in result.ranks}
        if result.outcome not in WORKED or not here:
            return []
        self.worked |= here
        for node in here:
            self.strikes.pop(node, None)
        elsewhere = [node for node, own in self._failed_on.pop(trial, {}).items() if node not in here and not own]
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
