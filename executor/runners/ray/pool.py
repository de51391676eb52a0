"""The pool: gangs of any size, formed for each trial of warm seats on the nodes of a Ray cluster."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executor.errors import RunnerError
from executor.failures import failure_table
from executor.runners.gang import Work
from executor.runners.gangs import Gangs
from executor.runners.layout import how_often, lay_out, tensor_span, too_few_left, why_never, without
from executor.runners.ray.formation import Formation, GangTerms, Kinds
from executor.runners.ray.node_pool import NodePool, cores_of
from executor.runners.ray.nodes import NodeWatch
from executor.runners.ray.rank_slots import Mailbox, RankSlot, SeatTerms, end_ranks
from executor.runners.runner import Event, Handle
from executor.runners.wear import TRIALS_IN_A_LIFE
from search_spaces.failure import Evidence, Sign
from search_spaces.model import Model
from search_spaces.outcome import Outcome
from search_spaces.trial import COMPARABLE, NodeEvent, TrialRequest, TrialResult

MOST_GANGS = 256
"""Where nobody says how many gangs there may be."""

_OF_A_NODE = (Outcome.FAILED, Outcome.INFEASIBLE, Outcome.LOST, Outcome.TIMEOUT, Outcome.WRONG)
"""Outcomes that may be a node's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTerms:
    """How a pool forms its gangs."""

    world_size: int
    """Ranks of a trial where nothing else is asked for: what `room` counts in."""
    gangs: int | None
    """At most so many trials run side by side; None: as many as fit."""
    tensor_across_nodes: bool
    """Whether a tensor-parallel group may be on several nodes."""
    placement_seconds: float
    """How long room is waited for that is taken, or has gone with a node."""
    python_path: tuple[str, ...]
    device: str
    own_cores: int
    """Cores that each rank has to itself where trials run side by side on CPUs; 0: ranks hold devices."""


class Pool(Gangs):
    """Forms gangs, keeps them for trials on the same seats, and takes them apart where another formation is wanted.

    - A gang has consecutive ranks on each node, and a tensor-parallel group lies within one unless `tensor_across_nodes`.
    - A gang that is formed of the same seats is the same gang: its communicators stay. One of other seats takes their rank
      processes as they are, and joins them in a new process group.
    - Side by side on CPUs each rank has its own cores. Where they do not suffice for two trials, one runs at a time, on all
      cores; if its ranks take turns there, the result says that it is comparable within the job only.
    - A node that Ray loses takes its seats with it; the trials on it are LOST. One that joins is used by the next trial.

    Raises:
        RunnerError: there is no room for a gang within `placement_seconds`, at first, or when nothing runs any more.
    """

    def __init__(self, terms: PoolTerms, seat_terms: SeatTerms) -> None:
        self._terms = terms
        self._post = Mailbox()
        self._watch = NodeWatch()
        self._ground = NodePool(seat_terms, self._watch, self._post, terms.own_cores)
        self._most = terms.gangs or MOST_GANGS
        if self._ground.own_cores and how_often(terms.world_size, self._ground.whole(), self._most) < 2:
            self._ground.own_cores, self._most = 0, 1
        self._takes_turns = not (terms.device == "cuda" or seat_terms.bundle.get("GPU") or self._ground.own_cores)
        self._known = self._ground.whole()
        gang_terms = GangTerms(
            python_path=terms.python_path,
            device=terms.device,
            environment=seat_terms.environment,
            alone=self._most == 1,
        )
        self._formation = Formation(gang_terms, self._ground, self._watch, self._post)
        self._running = self._formation.running
        self._told: list[Event] = []
        self._short_since: float | None = None
        self._place_first()

    def begin(self, request: Work) -> bool:
        """Take the attempt if there is, or can be, a gang for it; see `Gangs`."""
        if len(self._running) >= self._most:
            return False
        self._post.collect(0.0)
        block = 1 if self._terms.tensor_across_nodes else tensor_span(request)
        excluded = request.excluded_nodes if isinstance(request, TrialRequest) else ()
        kinds = request.node_kinds if isinstance(request, TrialRequest) else ()
        formed = self._formation.take(request.world_size, block, excluded, kinds)
        if formed is None:
            return self._has_no_place(request, block, excluded, kinds)
        self._short_since = None
        if not formed.gang.is_up:  # one that is up sees to it itself
            fresh = isinstance(request, TrialRequest) and request.fresh_processes
            end_ranks(seat for seat in formed.seats if fresh or seat.trials >= TRIALS_IN_A_LIFE)
        for seat in formed.seats:
            seat.trials += 1
        self._running[request.attempt] = formed
        formed.gang.start(request)
        return True

    def poll(self, timeout: float) -> list[Event]:
        """What happened; see `Gangs`."""
        self._note_nodes(self._watch.look_if_due())
        if not self._told:
            self._post.collect(timeout)
            while self._post.broken:
                self._note_nodes(self._watch.doubt(self._post.broken.pop().node.name))
            for formed in list(self._running.values()):
                for event in formed.gang.poll(0.0):
                    self._told.append(self._released(event) if isinstance(event, TrialResult) else event)
        told, self._told = self._told, []
        return told

    def end(self, handle: Handle, outcome: Outcome, message: str) -> TrialResult | None:
        """End the attempt if it runs; see `Gangs`."""
        if handle not in self._running:
            return None
        return self._released(self._running[handle].gang.end(outcome, message))

    def room(self) -> int:
        """How many further gangs of the usual size there are or can be."""
        return how_often(self._terms.world_size, self._formation.rooms(), self._most - len(self._running))

    def rooms(self) -> Mapping[str, int]:
        """Nodes that have room for ranks at all, and for how many; see `Gangs`."""
        return {name: room for name, room in self._ground.whole().items() if room}

    def warm_up(self, model: Model) -> None:
        """Start the ranks of every gang ahead that can be; see `Gangs`."""
        if not self._formation.idle and not self._running:
            for formed in self._formation.prepare(self._terms.world_size, self._most):
                formed.gang.warm_up(model)

    def close(self) -> None:
        """End every rank and give every seat back; see `Gangs`."""
        self._formation.idle.clear()
        self._running.clear()
        self._ground.close()

    def _place_first(self) -> None:
        """Reserve the seats of a gang: what cannot be placed is told before the first trial."""
        until = time.monotonic() + self._terms.placement_seconds
        while True:
            layout = lay_out(self._terms.world_size, 1, self._formation.rooms())
            if layout is not None and all(len(self._ground.grow(name, count)) == count for name, count in layout):
                return
            self._ground.close()
            left = until - time.monotonic()
            if left <= 0 or not self._ground.await_room(self._terms.world_size, left):
                raise RunnerError(self._missing(self._terms.world_size))

    def _missing(self, world_size: int) -> str:
        return self._ground.missing(world_size, self._terms.placement_seconds)

    def _released(self, result: TrialResult) -> TrialResult:
        """The result of a gang that is free now, with what the pool knows of it."""
        formed = self._formation.give_back(result.attempt)
        if result.node is None and result.outcome in _OF_A_NODE:
            result = dataclasses.replace(result, node=_node_of(formed.seats))
        return _marked(result, formed.seats) if self._takes_turns else result

    def _note_nodes(self, events: Sequence[NodeEvent]) -> None:
        for event in events:
            self._told.append(event)
            if event.kind == "lost":
                self._drop(event.node)
            else:
                self._known |= self._ground.whole()

    def _drop(self, name: str) -> None:
        """End what ran on a node that is gone; what its gangs had on other nodes stays."""
        self._ground.drop(name)  # first, for nobody there answers a gang that ends
        row, _ = failure_table().find(Evidence(signs=(Sign.OUT_OF_REACH,)))
        for formed in list(self._running.values()):
            if name in formed.shares:
                result = self._released(formed.gang.end(row.outcome, f"node {name} is lost", cause=row.name))
                self._told.append(dataclasses.replace(result, node=name))
        self._formation.forget(name)

    def _has_no_place(self, request: Work, block: int, excluded: Sequence[str], kinds: Kinds) -> bool:
        """Refuse what can never be placed; for anything else wait: for gangs that run, then `placement_seconds` more."""
        whole, world_size = self._ground.whole(), request.world_size
        if self._formation.layout(world_size, block, kinds, without(excluded, whole)) is None:
            if self._formation.layout(world_size, block, kinds, whole) is not None:
                return self._refuse(request, Outcome.LOST, None, too_few_left(world_size, excluded, whole))
            if self._formation.layout(world_size, block, kinds, self._known) is None:
                rule, message = why_never(world_size, block, self._known, kinds)
                return self._refuse(request, Outcome.INVALID, rule, message)
        if self._running:
            return False
        self._short_since = self._short_since or time.monotonic()
        if time.monotonic() - self._short_since > self._terms.placement_seconds:
            raise RunnerError(self._missing(world_size))
        return False

    def _refuse(self, request: Work, outcome: Outcome, rule: str | None, message: str) -> bool:
        self._told.append(TrialResult(attempt=request.attempt, outcome=outcome, rule=rule, message=message))
        return True


def _node_of(seats: Sequence[RankSlot]) -> str | None:
    """The node that a gang's failure is of, where that can be told: the one out of reach, or its only one."""
    nodes = {seat.node.name for seat in seats if seat.out_of_reach} or {seat.node.name for seat in seats}
    return nodes.pop() if len(nodes) == 1 else None


def _marked(result: TrialResult, seats: Sequence[RankSlot]) -> TrialResult:
    """The result; where ranks took turns on a core it says that only what was measured in the same way compares with it."""
    hosts = {seat.node.host: seat.node for seat in seats}
    for host, node in hosts.items():
        ranks = sum(seat.node.host == host for seat in seats)
        if ranks > (cores := cores_of(node)):
            told = f"within the job only: {ranks} ranks took turns on {cores} cores"
            return dataclasses.replace(result, environment={**result.environment, COMPARABLE: told})
    return result
