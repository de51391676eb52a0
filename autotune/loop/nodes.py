"""What a job knows of the nodes that its ranks run on, from its attempts alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autotune.loop.failure_causes import kind_of_failure
from executor.measurement.stragglers import node_of
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from storage.records import AttemptRecord

STRIKES = 3
"""Trials in a row that must fail on a node and succeed elsewhere before the node is put in quarantine: one may be chance."""
WORKED = (Outcome.OK, Outcome.PRUNED)
"""Outcomes that say that the nodes of the ranks did what they should."""
BROKE = (Outcome.FAILED, Outcome.LOST, Outcome.TIMEOUT)
"""Outcomes that a node may be the cause of."""


@dataclass(slots=True)
class Nodes:
    """Follows the attempts of a job. The same attempts, in the same order, give the same answers in every process."""

    faults: frozenset[str] = frozenset()
    """Causes that lie in a node's hardware or driver, whatever ran on it: rows of the failure table."""
    own: frozenset[str] = frozenset()
    """Causes of the request's own rows: what they say of a node holds for this job alone."""
    shut: set[str] = field(default_factory=set)
    """Nodes that get no further trial of this job, by a row of its request."""
    worked: set[str] = field(default_factory=set)
    """Nodes on which a trial was measured."""
    slow: set[str] = field(default_factory=set)
    strikes: dict[str, set[int]] = field(default_factory=dict)
    """Node -> trials that failed on it and succeeded elsewhere, since it last worked."""
    _failed_on: dict[int, dict[str, bool]] = field(default_factory=dict)
    """Trial -> nodes that it failed on, in order, and whether that was by a row of the request: no strike against the node."""
    _errors: dict[tuple[str, str | None, str], set[str]] = field(default_factory=dict)
    """Kind of failure -> nodes that had it."""

    def recall(self, attempts: Iterable[AttemptRecord]) -> None:
        """Take in the attempts that were made before."""
        for attempt in attempts:
            if attempt.result is not None:
                self.note(attempt.trial_number, attempt.result)

    def note(self, trial: int, result: TrialResult) -> list[str]:
        """Take in how an attempt ended; return the nodes that it shows to fail, again and again, what succeeds elsewhere."""
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

    def failed_on(self, trial: int) -> tuple[str, ...]:
        """The nodes that the trial failed on, if it has not succeeded since."""
        return tuple(self._failed_on.get(trial, ()))

    def is_suspect(self, trial: int, result: TrialResult) -> bool:
        """Whether an error may be its node's and not the configuration's; asked before `note`.

        It may where nothing ever worked on that node and no other node had this error, or where its cause is a node's. The
        trial is tried on other nodes once.
        """
        if result.outcome is not Outcome.FAILED or result.node is None or self.failed_on(trial):
            return False
        alone = self._errors.get(kind_of_failure(result), set()) <= {result.node}
        return result.cause in self.faults or (alone and result.node not in self.worked)

    def kept_off(self, trial: int, quarantined: Iterable[str], rooms: Mapping[str, int], ranks: int) -> tuple[str, ...]:
        """The nodes that the trial's next attempt is to keep off, as far as there is room for its ranks without them.

        First those in quarantine, then those that are shut for this job, those that it failed on, and slow ones.
        """
        off: set[str] = set()
        for node in (*quarantined, *sorted(self.shut), *self.failed_on(trial), *sorted(self.slow)):
            if node in rooms and has_room(rooms, {*off, node}, ranks):
                off.add(node)
        return tuple(sorted(off))


def has_room(rooms: Mapping[str, int], without: Iterable[str], ranks: int) -> bool:
    """Whether so many ranks can be placed without these nodes."""
    shut = set(without)
    return sum(room for node, room in rooms.items() if node not in shut) >= ranks
