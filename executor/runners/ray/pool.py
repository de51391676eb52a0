"""The pool: gangs of any size, formed for each trial from warm slots on the nodes of a Ray cluster."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executor.errors import RunnerError
from executor.failures import failure_table
from executor.runners.gang import Work
from executor.runners.gang_runner import Gangs
from executor.runners.layout import count_gangs, explain_exclusion, explain_impossible, lay_out, tensor_span, without
from executor.runners.ray.formation import Formation, GangSettings, Kinds
from executor.runners.ray.node_pool import NodePool, cores_of
from executor.runners.ray.nodes import NodeTracker
from executor.runners.ray.rank_slots import Mailbox, RankSlot, SlotSettings, end_ranks
from executor.runners.runner import Event, Handle
from executor.runners.wear import TRIALS_PER_PROCESS
from search_spaces.failure import Evidence, Sign
from search_spaces.models.model import Model
from search_spaces.outcome import Outcome
from search_spaces.trial import COMPARABLE, NodeEvent, TrialRequest, TrialResult

_NODE_OUTCOMES = (Outcome.FAILED, Outcome.INFEASIBLE, Outcome.LOST, Outcome.TIMEOUT, Outcome.WRONG)
"""Outcomes that may be caused by a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Settings by which a pool forms its gangs."""

    world_size: int
    """Usual number of ranks of a trial: the unit of `free_gangs`."""
    gangs: int | None
    """Most trials that run side by side; None: as many as fit."""
    tensor_across_nodes: bool
    """Whether a tensor-parallel group may span several nodes."""
    placement_seconds: float
    """How long to wait for capacity that is in use, or was lost with a node."""
    python_path: tuple[str, ...]
    device: str
    own_cores: int
    """Exclusive cores of each rank if trials run side by side on CPUs; 0: ranks use devices."""


class GangPool(Gangs):
    """Forms gangs, keeps them for trials on the same slots, and dissolves them when other gangs are needed.

    - A gang has consecutive ranks on each node, and a tensor-parallel group lies within a node unless `tensor_across_nodes`.
    - The same slots give the same gang, which keeps its communicators. A gang of other slots reuses their rank processes and
      joins them in a new process group.
    - If trials run side by side on CPUs, each rank has its own cores. If the cores do not suffice for two trials, one runs at a
      time, on all cores; if its ranks take turns there, the result says that it is comparable only within the job.
    - If Ray loses a node, its slots are lost and the trials on it are LOST. A node that joins is used by the next trial.

    Raises:
        RunnerError: there is no capacity for a gang within `placement_seconds`, at the start or when no trial is running.
    """

    def __init__(self, settings: PoolSettings, slot_settings: SlotSettings) -> None:
        self._settings = settings
        self._mailbox = Mailbox()
        self._tracker = NodeTracker()
        self._node_pool = NodePool(slot_settings, self._tracker, self._mailbox, settings.own_cores)
        self._max_gangs = settings.gangs or 256
        if (
            self._node_pool.own_cores
            and count_gangs(settings.world_size, self._node_pool.total_capacities(), self._max_gangs) < 2
        ):
            self._node_pool.own_cores, self._max_gangs = 0, 1
        self._takes_turns = not (settings.device == "cuda" or slot_settings.bundle.get("GPU") or self._node_pool.own_cores)
        self._known_capacities = self._node_pool.total_capacities()
        gang_settings = GangSettings(
            python_path=settings.python_path,
            device=settings.device,
            environment=slot_settings.environment,
            exclusive=self._max_gangs == 1,
        )
        self._formation = Formation(gang_settings, self._node_pool, self._tracker, self._mailbox)
        self._running = self._formation.running
        self._events: list[Event] = []
        self._short_since: float | None = None
        self._reserve_first_gang()

    def begin(self, request: Work) -> bool:
        """Accept the attempt if a gang for it exists or can be formed; see `Gangs`."""
        if len(self._running) >= self._max_gangs:
            return False
        self._mailbox.collect(0.0)
        block = 1 if self._settings.tensor_across_nodes else tensor_span(request)
        excluded = request.excluded_nodes if isinstance(request, TrialRequest) else ()
        kinds = request.node_kinds if isinstance(request, TrialRequest) else ()
        formed = self._formation.take(request.world_size, block, excluded, kinds)
        if formed is None:
            return self._refuse_or_wait(request, block, excluded, kinds)
        self._short_since = None
        if not formed.gang.is_up:  # a gang with processes replaces them itself
            fresh = isinstance(request, TrialRequest) and request.fresh_processes
            end_ranks(slot for slot in formed.slots if fresh or slot.trials >= TRIALS_PER_PROCESS)
        for slot in formed.slots:
            slot.trials += 1
        self._running[request.attempt] = formed
        formed.gang.start(request)
        return True

    def poll(self, timeout: float) -> list[Event]:
        """Return the new events; see `Gangs`."""
        self._note_nodes(self._tracker.refresh_if_due())
        if not self._events:
            self._mailbox.collect(timeout)
            while self._mailbox.unreachable:
                self._note_nodes(self._tracker.check(self._mailbox.unreachable.pop().node.name))
            for formed in list(self._running.values()):
                for event in formed.gang.poll(0.0):
                    self._events.append(self._released(event) if isinstance(event, TrialResult) else event)
        events, self._events = self._events, []
        return events

    def end(self, handle: Handle, outcome: Outcome, message: str) -> TrialResult | None:
        """Abort the attempt if it is running; see `Gangs`."""
        if handle not in self._running:
            return None
        return self._released(self._running[handle].gang.end(outcome, message))

    def free_gangs(self) -> int:
        """Return how many further gangs of the usual size are free or can be formed."""
        return count_gangs(self._settings.world_size, self._formation.free_capacities(), self._max_gangs - len(self._running))

    def node_capacities(self) -> Mapping[str, int]:
        """Node -> ranks that it could hold, for nodes that can hold any; see `Gangs`."""
        return {name: capacity for name, capacity in self._node_pool.total_capacities().items() if capacity}

    def warm_up(self, model: Model) -> None:
        """Start the ranks of as many gangs as possible in advance; see `Gangs`."""
        if not self._formation.idle and not self._running:
            for formed in self._formation.prepare(self._settings.world_size, self._max_gangs):
                formed.gang.warm_up(model)

    def close(self) -> None:
        """End every rank and release every slot; see `Gangs`."""
        self._formation.idle.clear()
        self._running.clear()
        self._node_pool.close()

    def _reserve_first_gang(self) -> None:
        """Reserve the slots of a gang, so that an impossible placement is an error before the first trial."""
        until = time.monotonic() + self._settings.placement_seconds
        while True:
            layout = lay_out(self._settings.world_size, 1, self._formation.free_capacities())
            if layout is not None and all(len(self._node_pool.reserve(name, count)) == count for name, count in layout):
                return
            self._node_pool.close()
            remaining = until - time.monotonic()
            if remaining <= 0 or not self._node_pool.await_capacity(self._settings.world_size, remaining):
                raise RunnerError(self._missing(self._settings.world_size))

    def _missing(self, world_size: int) -> str:
        return self._node_pool.missing(world_size, self._settings.placement_seconds)

    def _released(self, result: TrialResult) -> TrialResult:
        """Release the gang of a result; return the result, completed by what the pool knows about it."""
        formed = self._formation.give_back(result.attempt)
        if result.node is None and result.outcome in _NODE_OUTCOMES:
            result = dataclasses.replace(result, node=_node_of(formed.slots))
        return _mark_time_shared(result, formed.slots) if self._takes_turns else result

    def _note_nodes(self, events: Sequence[NodeEvent]) -> None:
        for event in events:
            self._events.append(event)
            if event.kind == "lost":
                self._drop(event.node)
            else:
                self._known_capacities |= self._node_pool.total_capacities()

    def _drop(self, name: str) -> None:
        """End the gangs on a lost node; their rank processes on other nodes are kept."""
        self._node_pool.drop(name)  # first, because the node would not answer a gang that ends its ranks
        row, _ = failure_table().find(Evidence(signs=(Sign.OUT_OF_REACH,)))
        for formed in list(self._running.values()):
            if name in formed.shares:
                result = self._released(formed.gang.end(row.outcome, f"node {name} is lost", cause=row.name))
                self._events.append(dataclasses.replace(result, node=name))
        self._formation.forget(name)

    def _refuse_or_wait(self, request: Work, block: int, excluded: Sequence[str], kinds: Kinds) -> bool:
        """Refuse a trial that can never be placed. Otherwise wait: for running gangs, then `placement_seconds` more."""
        whole, world_size = self._node_pool.total_capacities(), request.world_size
        if self._formation.layout(world_size, block, kinds, without(excluded, whole)) is None:
            if self._formation.layout(world_size, block, kinds, whole) is not None:
                return self._refuse(request, Outcome.LOST, None, explain_exclusion(world_size, excluded, whole))
            if self._formation.layout(world_size, block, kinds, self._known_capacities) is None:
                rule, message = explain_impossible(world_size, block, self._known_capacities, kinds)
                return self._refuse(request, Outcome.INVALID, rule, message)
        if self._running:
            return False
        self._short_since = self._short_since or time.monotonic()
        if time.monotonic() - self._short_since > self._settings.placement_seconds:
            raise RunnerError(self._missing(world_size))
        return False

    def _refuse(self, request: Work, outcome: Outcome, rule: str | None, message: str) -> bool:
        self._events.append(TrialResult(attempt=request.attempt, outcome=outcome, rule=rule, message=message))
        return True


def _node_of(slots: Sequence[RankSlot]) -> str | None:
    """Return the node that caused a gang's failure, if it is known: the one out of reach, or the gang's only node."""
    nodes = {slot.node.name for slot in slots if slot.out_of_reach} or {slot.node.name for slot in slots}
    return nodes.pop() if len(nodes) == 1 else None


def _mark_time_shared(result: TrialResult, slots: Sequence[RankSlot]) -> TrialResult:
    """Mark the result as comparable only within the job if ranks took turns on cores."""
    hosts = {slot.node.host: slot.node for slot in slots}
    for host, node in hosts.items():
        ranks = sum(slot.node.host == host for slot in slots)
        if ranks > (cores := cores_of(node)):
            note = f"within the job only: {ranks} ranks took turns on {cores} cores"
            return dataclasses.replace(result, environment={**result.environment, COMPARABLE: note})
    return result
