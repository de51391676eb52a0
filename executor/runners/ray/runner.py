"""The runner on Ray, and its pool: gangs of any size, formed for each trial from warm slots on the nodes of a cluster."""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence

import ray

from executor.errors import RunnerError, failure_table
from executor.runners.gang import Work
from executor.runners.gang_runner import GangsRunner
from executor.runners.rank_process import passed_variables
from executor.runners.ray.cluster import RayCluster
from executor.runners.ray.formation import (
    Formation,
    Kinds,
    NodePool,
    cores_of,
    count_gangs,
    explain_exclusion,
    explain_impossible,
    lay_out,
    tensor_span,
    without,
)
from executor.runners.ray.nodes import NodeTracker
from executor.runners.ray.rank_slots import Mailbox, RankSlot, SlotSettings, end_ranks
from executor.runners.runner import Event, Handle
from executor.runners.transport import RUN_TRIAL
from executor.runners.watchdog import TRIALS_PER_PROCESS
from search_spaces.failure import Evidence, Sign
from search_spaces.models.model import Model
from search_spaces.outcome import Outcome
from search_spaces.trial import COMPARABLE, NodeEvent, TrialRequest, TrialResult


class RayRunner(GangsRunner):
    """Runs trials on a Ray cluster, several side by side if it is larger than a trial, on ranks that stay warm between trials.

    `world_size` is a trial's usual number of ranks; each trial runs with its own. At most `gangs` trials run at a time; None:
    as many as fit on a joined cluster or on the GPUs of a Ray that is started here, and one on the CPUs of the latter.

    Without `address` a Ray is started on this machine, with as many CPU slots as ranks if there are fewer cores, and stopped by
    `close`. If the process is already connected to Ray, that connection is used and kept open.
    A rank takes `cpus_per_rank` and `gpus_per_rank`; None: one GPU each for the device `cuda`, and for `auto` if the cluster
    has that many. `resources` are further Ray resources of each rank; `environment` is added to the ranks'.

    - A gang has consecutive ranks on each node, and a tensor-parallel group lies within a node unless `tensor_across_nodes`.
    - The same slots give the same gang, which keeps its communicators. A gang of other slots reuses their rank processes and
      joins them in a new process group.
    - If trials run side by side on CPUs, each rank has its own cores. If the cores do not suffice for two trials, one runs at a
      time, on all cores; if its ranks take turns there, the result says that it is comparable only within the job.
    - If Ray loses a node, its slots are lost and the trials on it are LOST. A node that joins is used by the next trial.

    Raises:
        RunnerError: Ray does not start or answer, has no GPUs although they are required, or there is no capacity for a gang
            within `placement_seconds`, at the start or when no trial is running.
    """

    startup_seconds: float
    """Time to start Ray, or to connect."""

    def __init__(
        self,
        world_size: int,
        *,
        address: str | None = None,
        gangs: int | None = None,
        tensor_across_nodes: bool = False,
        python_path: Sequence[str] = (),
        cpus_per_rank: float = 1.0,
        gpus_per_rank: float | None = None,
        resources: Mapping[str, float] | None = None,
        placement_seconds: float = 60.0,
        device: str = "auto",
        environment: Mapping[str, str] | None = None,
        trial_function: str = RUN_TRIAL,
    ) -> None:
        super().__init__()
        self._world_size = world_size
        self._tensor_across_nodes = tensor_across_nodes
        self._placement_seconds = placement_seconds
        self._pool_events: list[Event] = []
        self._short_since: float | None = None
        cores = max(len(os.sched_getaffinity(0)), int(world_size * cpus_per_rank + 0.999))
        self._cluster = RayCluster(address, cores)
        self.startup_seconds = self._cluster.startup_seconds
        try:
            gpus = _gpus(world_size, gpus_per_rank, device)
            bundle = {"CPU": cpus_per_rank, **({"GPU": gpus} if gpus else {}), **(resources or {})}
            # Trials side by side on the CPUs of one machine would disturb each other, because they share its memory.
            disturbed = gangs is None and self._cluster.started and address is None and not gpus
            self._max_gangs = 1 if disturbed else gangs or 256
            variables = {**passed_variables(os.environ), **(environment or {})}
            slot_settings = SlotSettings(bundle=bundle, environment=variables, trial_function=trial_function)
            self._mailbox = Mailbox()
            self._tracker = NodeTracker()
            own_cores = 0 if gpus else max(1, int(cpus_per_rank))
            self._node_pool = NodePool(slot_settings, self._tracker, self._mailbox, own_cores)
            self._known_capacities = self._node_pool.total_capacities()
            if own_cores and count_gangs(world_size, self._known_capacities, self._max_gangs) < 2:
                self._node_pool.own_cores, self._max_gangs = 0, 1
                self._known_capacities = self._node_pool.total_capacities()
            self._takes_turns = not (device == "cuda" or bundle.get("GPU") or self._node_pool.own_cores)
            self._formation = Formation(
                self._node_pool, self._tracker, self._mailbox,
                python_path=tuple(python_path), device=device, exclusive=self._max_gangs == 1,
            )  # fmt: skip
            self._running = self._formation.running
            self._reserve_first_gang()
        except BaseException:
            self._cluster.close()
            raise

    def begin(self, request: Work) -> bool:
        """Accept the attempt if a gang for it exists or can be formed; see `GangsRunner`."""
        if len(self._running) >= self._max_gangs:
            return False
        self._mailbox.collect(0.0)
        block = 1 if self._tensor_across_nodes else tensor_span(request)
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
        """Return the new events; see `GangsRunner`."""
        self._note_nodes(self._tracker.refresh_if_due())
        if not self._pool_events:
            self._mailbox.collect(timeout)
            while self._mailbox.unreachable:
                self._note_nodes(self._tracker.check(self._mailbox.unreachable.pop().node.name))
            for formed in list(self._running.values()):
                for event in formed.gang.poll(0.0):
                    self._pool_events.append(self._released(event) if isinstance(event, TrialResult) else event)
        events, self._pool_events = self._pool_events, []
        return events

    def end(self, handle: Handle, outcome: Outcome, message: str) -> TrialResult | None:
        """Abort the attempt if it is running; see `GangsRunner`."""
        if handle not in self._running:
            return None
        return self._released(self._running[handle].gang.end(outcome, message))

    def free_gangs(self) -> int:
        """Return how many further gangs of the usual size are free or can be formed."""
        return count_gangs(self._world_size, self._formation.free_capacities(), self._max_gangs - len(self._running))

    def node_capacities(self) -> Mapping[str, int]:
        """Node -> ranks that it could hold, for nodes that can hold any; see `GangsRunner`."""
        return {name: capacity for name, capacity in self._node_pool.total_capacities().items() if capacity}

    def warm_up(self, model: Model) -> None:
        """Start the ranks of as many gangs as possible in advance; see `GangsRunner`."""
        if not self._formation.idle and not self._running:
            for formed in self._formation.prepare(self._world_size, self._max_gangs):
                formed.gang.warm_up(model)

    def close(self) -> None:
        """End every process and release every slot; see `Runner`."""
        super().close()
        self._formation.idle.clear()
        self._running.clear()
        self._node_pool.close()
        self._cluster.close()

    def _reserve_first_gang(self) -> None:
        """Reserve the slots of a gang, so that an impossible placement is an error before the first trial."""
        until = time.monotonic() + self._placement_seconds
        while True:
            layout = lay_out(self._world_size, 1, self._formation.free_capacities())
            if layout is not None and all(len(self._node_pool.reserve(name, count)) == count for name, count in layout):
                return
            self._node_pool.close()
            remaining = until - time.monotonic()
            if remaining <= 0 or not self._node_pool.await_capacity(self._world_size, remaining):
                raise RunnerError(self._node_pool.missing(self._world_size, self._placement_seconds))

    def _released(self, result: TrialResult) -> TrialResult:
        """Release the gang of a result; return the result, completed by what the pool knows about it."""
        formed = self._formation.give_back(result.attempt)
        # A node may be the cause of these outcomes.
        node_outcomes = (Outcome.FAILED, Outcome.INFEASIBLE, Outcome.LOST, Outcome.TIMEOUT, Outcome.WRONG)
        if result.node is None and result.outcome in node_outcomes:
            # The node that is out of reach, or the gang's only node.
            nodes = {slot.node.name for slot in formed.slots if slot.out_of_reach} or {slot.node.name for slot in formed.slots}
            result = dataclasses.replace(result, node=nodes.pop() if len(nodes) == 1 else None)
        return _mark_time_shared(result, formed.slots) if self._takes_turns else result

    def _note_nodes(self, events: Sequence[NodeEvent]) -> None:
        for event in events:
            self._pool_events.append(event)
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
                self._pool_events.append(dataclasses.replace(result, node=name))
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
        if time.monotonic() - self._short_since > self._placement_seconds:
            raise RunnerError(self._node_pool.missing(world_size, self._placement_seconds))
        return False

    def _refuse(self, request: Work, outcome: Outcome, rule: str | None, message: str) -> bool:
        self._pool_events.append(TrialResult(attempt=request.attempt, outcome=outcome, rule=rule, message=message))
        return True


def _mark_time_shared(result: TrialResult, slots: Sequence[RankSlot]) -> TrialResult:
    """Mark the result as comparable only within the job if ranks took turns on cores."""
    hosts = {slot.node.host: slot.node for slot in slots}
    for host, node in hosts.items():
        ranks = sum(slot.node.host == host for slot in slots)
        if ranks > (cores := cores_of(node)):
            note = f"within the job only: {ranks} ranks took turns on {cores} cores"
            return dataclasses.replace(result, environment={**result.environment, COMPARABLE: note})
    return result


def _gpus(world_size: int, requested: float | None, device: str) -> float:
    """Return the GPUs of a rank."""
    cluster_gpus = ray.cluster_resources().get("GPU", 0)
    if requested is None:
        requested = 1.0 if device == "cuda" or (device == "auto" and cluster_gpus >= world_size) else 0.0
    if requested and not cluster_gpus:
        raise RunnerError("the job is for GPUs and the Ray cluster has none; start Ray on nodes that have some, or use the CPU")
    return requested
