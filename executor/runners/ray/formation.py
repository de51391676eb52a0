"""Gangs on a Ray cluster: the capacity of its nodes and the slots reserved there, the layout of a trial's ranks on nodes, and
the gangs that run or are kept for the next trial.
"""

import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from executor.runners.gang import Gang, Work
from executor.runners.ray.nodes import NodeTracker, RayNode
from executor.runners.ray.rank_slots import Mailbox, RankSlot, SlotSettings, SlotTransport, end_ranks
from executor.runners.runner import Handle
from search_spaces.mesh import ABBREVIATIONS, TENSOR, make_mesh
from search_spaces.trial import TrialRequest

RESERVE_SECONDS = 2.0
"""Time for Ray to reserve resources that it has reported as free."""


class NodePool:
    """Slots on the nodes, created on demand and kept until the end. Used from one thread.

    `own_cores`: exclusive cores of each slot; 0: slots are not bound to cores.
    """

    _VIEW_SECONDS = 1.0
    """Maximum age of the cached view of free resources."""

    def __init__(self, settings: SlotSettings, tracker: NodeTracker, mailbox: Mailbox, own_cores: int = 0) -> None:
        self._settings = settings
        self._tracker = tracker
        self._mailbox = mailbox
        self.own_cores = own_cores
        self.slots: list[RankSlot] = []
        self._full_until: dict[str, float] = {}
        self._free: Mapping[str, Mapping[str, float]] = {}
        self._viewed_at = -self._VIEW_SECONDS

    def total_capacities(self) -> dict[str, int]:
        """Node -> slots that it could hold if nothing else used it."""
        free_slots = (
            {node.host: cores_of(node) // self.own_cores for node in self._tracker.nodes.values()} if self.own_cores else {}
        )
        capacities = {}
        for node in self._tracker.nodes.values():
            capacities[node.name] = _fitting(self._settings.bundle, node.resources)
            if self.own_cores:
                capacities[node.name] = min(capacities[node.name], free_slots[node.host])
                free_slots[node.host] -= capacities[node.name]
        return capacities

    def spare_capacities(self) -> dict[str, int]:
        """Node -> further slots that it can hold now."""
        now = time.monotonic()
        if now - self._viewed_at >= self._VIEW_SECONDS:
            self._free, self._viewed_at = ray._private.state.available_resources_per_node(), now
        mine = Counter(slot.node.name for slot in self.slots)
        capacities = {}
        for name, whole in self.total_capacities().items():
            # Ray reports recent reservations late, so our own slots are counted here.
            free = _fitting(self._settings.bundle, self._free.get(self._tracker.nodes[name].node_id, {}))
            full = now < self._full_until.get(name, 0.0)
            capacities[name] = 0 if full else max(0, min(whole - mine[name], free))
        return capacities

    def reserve(self, name: str, count: int) -> list[RankSlot]:
        """Reserve `count` further slots on a node; empty if Ray does not grant them."""
        node = self._tracker.nodes[name]
        bundles = [dict(self._settings.bundle) for _ in range(count)]
        selector = [{"ray.io/node-id": node.node_id} for _ in range(count)]
        group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=selector)
        if not group.wait(RESERVE_SECONDS):
            remove_placement_group(group)
            self._full_until[name] = time.monotonic() + 10.0  # the node counts as full until then
            return []
        self._viewed_at = -self._VIEW_SECONDS
        reserved = []
        for index in range(count):
            reserved.append(RankSlot(self._settings, node, group, index, self._free_cores(node), self._mailbox))
            self.slots.append(reserved[-1])
        return reserved

    def await_capacity(self, world_size: int, seconds: float) -> bool:
        """Wait until Ray has capacity for `world_size` ranks; return whether it has. The request triggers an autoscaler."""
        group = placement_group([dict(self._settings.bundle) for _ in range(world_size)], strategy="PACK")
        has_capacity = bool(group.wait(seconds))
        remove_placement_group(group)
        self._viewed_at = -self._VIEW_SECONDS
        self._tracker.refresh()
        return has_capacity

    def missing(self, world_size: int, seconds: float) -> str:
        """Return one line: the resources that a gang of `world_size` ranks lacks."""
        total, free = ray.cluster_resources(), ray.available_resources()
        short = []
        for name, amount in self._settings.bundle.items():
            has = free.get(name, 0.0) + len(self.slots) * amount
            if world_size * amount > has:
                short.append(f"{world_size * amount:g} {name} needed, {has:g} free of {total.get(name, 0):g}")
        bundle = ", ".join(f"{amount:g} {name}" for name, amount in self._settings.bundle.items())
        lacking = "; ".join(short or [f"no node has room for {bundle}"])
        return f"{world_size} ranks cannot be placed on Ray within {seconds:g} s: {lacking}; give fewer ranks or add nodes"

    def drop(self, name: str) -> None:
        """Drop the slots of a lost node."""
        gone = [slot for slot in self.slots if slot.node.name == name]
        self.slots = [slot for slot in self.slots if slot.node.name != name]
        for slot in gone:
            slot.request_end()  # a node that is only disconnected ends its rank when it gets the request
            slot.end_actor()
        _give_back(gone)

    def close(self) -> None:
        """End every rank and actor, and release the reservations."""
        slots, self.slots = self.slots, []
        if not ray.is_initialized():  # Ray's end has ended all of them
            return
        end_ranks(slots)
        for slot in slots:
            slot.end_actor()
        _give_back(slots)

    def _free_cores(self, node: RayNode) -> tuple[int, ...] | None:
        if not self.own_cores:
            return None
        used_cores = {core for slot in self.slots if slot.node.host == node.host for core in slot.cores or ()}
        return tuple(itertools.islice((core for core in itertools.count() if core not in used_cores), self.own_cores))


def cores_of(node: RayNode) -> int:
    """Return the cores that ranks on the node can use: counted on this machine, as configured in Ray on others."""
    if node.host == socket.gethostname():
        return len(os.sched_getaffinity(0))
    return int(node.resources.get("CPU", 0))


def _fitting(bundle: Mapping[str, float], resources: Mapping[str, float]) -> int:
    return min(int(resources.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items() if amount > 0)


def _give_back(slots: list[RankSlot]) -> None:
    for group in {slot.group.id: slot.group for slot in slots}.values():
        remove_placement_group(group)


Layout = list[tuple[str, int]]
"""Nodes in the order of their ranks, each with its number of ranks. Ranks of a node are consecutive."""


def tensor_span(request: Work) -> int:
    """Return how many consecutive ranks a tensor-parallel group spans: its members and the ranks between them.

    Blocks of this size contain whole groups, whatever the order of the mesh.
    """
    if not isinstance(request, TrialRequest) or request.config.tensor_parallel_size == 1:
        return 1
    mesh = make_mesh(request.config, request.world_size)
    span = 1
    for short in mesh.order.split("-"):
        span *= mesh.size(ABBREVIATIONS[short])
        if ABBREVIATIONS[short] == TENSOR:
            break
    return span if request.world_size % span == 0 else 1  # the engine refuses indivisible sizes, with the reason


def lay_out(world_size: int, block: int, capacities: Mapping[str, int]) -> Layout | None:
    """Place `world_size` ranks on nodes with these capacities, in whole blocks; None: they do not fit.

    1. Use as few nodes as possible, counting the largest capacities first.
    2. On that many nodes, use equal shares if possible, because a gang waits for its most crowded link. Of the nodes that can
       hold a share take those with the smallest capacity, so that larger ones stay free for others.
    3. Otherwise fill the largest nodes, and place the rest on the smallest node that can hold it.

    Of equal nodes the first in `capacities` is taken. Ranks are assigned to the nodes in the order of `capacities`.
    """
    usable = {name: capacity // block * block for name, capacity in capacities.items() if capacity >= block}
    descending = sorted(usable, key=lambda name: -usable[name])
    reached = itertools.accumulate(usable[name] for name in descending)
    count = next((number for number, total in enumerate(reached, 1) if total >= world_size), None)
    if count is None:
        return None
    share, left_over = divmod(world_size, count)
    holding = sorted((name for name in usable if usable[name] >= share), key=usable.__getitem__)
    if left_over == 0 and share % block == 0 and len(holding) >= count:
        shares = dict.fromkeys(holding[:count], share)
    else:
        shares = {name: usable[name] for name in descending[: count - 1]}
        remainder = world_size - sum(shares.values())
        last = min((name for name in usable if name not in shares and usable[name] >= remainder), key=usable.__getitem__)
        shares[last] = remainder
    return [(name, shares[name]) for name in capacities if name in shares]


def lay_out_kinds(
    kinds: Sequence[tuple[str, int]], block: int, capacities: Mapping[str, int], resources: Mapping[str, Mapping[str, float]]
) -> Layout | None:
    """Place ranks on nodes of different kinds, each kind on nodes with its resource; None: they do not fit."""
    free_slots, layout = dict(capacities), list[tuple[str, int]]()
    for kind, ranks in kinds:
        part = lay_out(ranks, block, {name: free for name, free in free_slots.items() if resources.get(name, {}).get(kind)})
        if part is None:
            return None
        layout += part
        free_slots |= {name: free_slots[name] - share for name, share in part}
    return layout


def count_gangs(world_size: int, capacities: Mapping[str, int], most: int) -> int:
    """Return how many gangs of `world_size` ranks fit side by side, at most `most`."""
    free_slots, count = dict(capacities), 0
    while count < most and (layout := lay_out(world_size, 1, free_slots)):
        for name, share in layout:
            free_slots[name] -= share
        count += 1
    return count


def without(excluded: Sequence[str], capacities: Mapping[str, int]) -> dict[str, int]:
    """Return the capacities of the nodes that are not excluded."""
    return {name: capacity for name, capacity in capacities.items() if name not in excluded}


def explain_exclusion(world_size: int, excluded: Sequence[str], capacities: Mapping[str, int]) -> str:
    """Return one line: the nodes that a trial may use do not suffice."""
    free_slots = sum(without(excluded, capacities).values())
    names = ", ".join(name for name in excluded if name in capacities)
    return (
        f"{world_size} ranks are needed, but there is room for {free_slots} without {names}, "
        "which this trial must not use; add nodes"
    )


def explain_impossible(
    world_size: int, block: int, capacities: Mapping[str, int], kinds: Sequence[tuple[str, int]] = ()
) -> tuple[str, str]:
    """Return the rule and the message for a trial that does not fit on all nodes together."""
    if (total := sum(capacities.values())) < world_size:
        return "world_size", f"the trial needs {world_size} ranks, but the Ray cluster has room for {total}; add nodes"
    if kinds:
        needed = ", ".join(f"{ranks} ranks on nodes with {kind}" for kind, ranks in kinds)
        return (
            "node_kinds",
            f"the trial needs {needed}, which the Ray cluster has no room for; start nodes with these resources",
        )
    largest = max(capacities.values(), default=0)
    return "tensor_across_nodes", (
        f"the trial's tensor-parallel groups span {block} ranks each, which the nodes have no room for (the largest "
        f"holds {largest}); use a smaller tensor_parallel_size, or allow such groups across nodes"
    )


@dataclass(frozen=True, slots=True, eq=False)
class FormedGang:
    """A gang and its slots in the order of its ranks."""

    gang: Gang
    slots: tuple[RankSlot, ...]

    @property
    def shares(self) -> Mapping[str, int]:
        """Node -> ranks on it."""
        return Counter(slot.node.name for slot in self.slots)


Kinds = Sequence[tuple[str, int]]
"""Like `TrialRequest.node_kinds`."""


class Formation:
    """Forms gangs. The same slots give the same gang; a gang of other slots reuses their rank processes.

    `exclusive`: one gang runs at a time, and its ranks share the cores of their hosts with no other gang.
    """

    def __init__(
        self,
        node_pool: NodePool,
        tracker: NodeTracker,
        mailbox: Mailbox,
        *,
        python_path: Sequence[str],
        device: str,
        exclusive: bool,
    ) -> None:
        self._python_path, self._device, self._exclusive = python_path, device, exclusive
        self._node_pool = node_pool
        self._tracker = tracker
        self._mailbox = mailbox
        self.idle: list[FormedGang] = []
        """Idle gangs, most recently used first."""
        self.running: dict[Handle, FormedGang] = {}

    def free_capacities(self) -> dict[str, int]:
        """Node -> ranks that it can take now: its free slots and those that can be added. Nodes with more free slots first."""
        free = Counter(slot.node.name for slot in self._free_slots())
        spare_capacities = self._node_pool.spare_capacities()
        return {
            name: free[name] + spare_capacities[name] for name in sorted(spare_capacities, key=lambda name: (-free[name], name))
        }

    def layout(self, world_size: int, block: int, kinds: Kinds, capacities: Mapping[str, int]) -> Layout | None:
        """Place `world_size` ranks on nodes; `kinds`: the required node kinds, if any. None: they do not fit."""
        if not kinds:
            return lay_out(world_size, block, capacities)
        return lay_out_kinds(kinds, block, capacities, {name: node.resources for name, node in self._tracker.nodes.items()})

    def take(self, world_size: int, block: int, excluded: Sequence[str], kinds: Kinds = ()) -> FormedGang | None:
        """Return a free gang of `world_size` ranks, with each block of them on one node; None: there is no capacity."""
        layout = self.layout(world_size, block, kinds, without(excluded, self.free_capacities()))
        idle_gang = self._reusable_gang(world_size, block, excluded, layout, kinds)
        if idle_gang is not None:
            self.idle.remove(idle_gang)
        return idle_gang or (None if layout is None else self._form(layout))

    def prepare(self, world_size: int, most: int) -> list[FormedGang]:
        """Form up to `most` gangs of `world_size` ranks in advance, as far as there is capacity; they are idle."""
        handles = [f"ahead-{number}" for number in range(most)]
        for handle in handles:
            formed = self.take(world_size, 1, ())
            if formed is None:
                break
            self.running[handle] = formed
        return [self.give_back(handle) for handle in handles if handle in self.running]

    def give_back(self, handle: Handle) -> FormedGang:
        """Make the gang of an attempt that has ended idle, and return it."""
        formed = self.running.pop(handle)
        self.idle.insert(0, formed)
        return formed

    def forget(self, name: str) -> None:
        """Dissolve the idle gangs that have ranks on a node."""
        self.idle = [formed for formed in self.idle if name not in formed.shares]

    def _reusable_gang(
        self, world_size: int, block: int, excluded: Sequence[str], layout: Layout | None, kinds: Kinds
    ) -> FormedGang | None:
        """Return an idle gang that fits unchanged and is on no more nodes than a new one would be."""
        kind_by_rank = [kind for kind, ranks in kinds for _ in range(ranks)]
        for formed in self.idle:
            shares = formed.shares
            whole = all(share % block == 0 for share in shares.values())
            fits = len(formed.slots) == world_size and not shares.keys() & set(excluded)
            if not fits or not whole or (layout is not None and len(shares) > len(layout)):
                continue
            of_kinds = zip(formed.slots, kind_by_rank, strict=bool(kinds))
            if all(slot.node.resources.get(kind) for slot, kind in of_kinds):
                return formed
        return None

    def _form(self, layout: Layout) -> FormedGang | None:
        """Form a new gang; None: there is no capacity after all. Idle gangs that share slots with it are dissolved."""
        slots: list[RankSlot] = []
        for name, count in layout:
            # Slots with a rank process first, otherwise in order, so that gangs stay the same.
            free = sorted((slot for slot in self._free_slots() if slot.node.name == name), key=lambda slot: not slot.is_up)
            if len(free) < count:
                free += self._node_pool.reserve(name, count - len(free))
            if len(free) < count:
                return None
            slots += free[:count]
        self.idle = [formed for formed in self.idle if not set(formed.slots) & set(slots)]
        transport = SlotTransport(slots, self._mailbox, None if self._exclusive else self._sharing())
        return FormedGang(Gang(transport, python_path=self._python_path, device=self._device), tuple(slots))

    def _free_slots(self) -> list[RankSlot]:
        busy = {slot for formed in self.running.values() for slot in formed.slots}
        return [slot for slot in self._node_pool.slots if slot not in busy]

    def _sharing(self) -> Mapping[str, int]:
        """Host -> ranks that share its cores: as many as it can hold."""
        sharing: Counter[str] = Counter()
        for name, capacity in self._node_pool.total_capacities().items():
            sharing[self._tracker.nodes[name].host] += max(1, capacity)
        return sharing
