"""The capacity of a Ray cluster's nodes, and the slots that are reserved on them."""

import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from executor.runners.ray.nodes import Node, NodeTracker
from executor.runners.ray.rank_slots import Mailbox, RankSlot, SlotSettings, end_ranks

RESERVE_SECONDS = 2.0
"""Time for Ray to reserve resources that it has reported as free."""
VIEW_SECONDS = 1.0
"""Maximum age of the cached view of free resources."""


class NodePool:
    """Slots on the nodes, created on demand and kept until the end. Used from one thread.

    `own_cores`: exclusive cores of each slot; 0: slots are not bound to cores.
    """

    def __init__(self, settings: SlotSettings, tracker: NodeTracker, mailbox: Mailbox, own_cores: int = 0) -> None:
        self._settings = settings
        self._tracker = tracker
        self._mailbox = mailbox
        self.own_cores = own_cores
        self.slots: list[RankSlot] = []
        self._full_until: dict[str, float] = {}
        self._free: Mapping[str, Mapping[str, float]] = {}
        self._viewed_at = -VIEW_SECONDS

    def total_capacities(self) -> dict[str, int]:
        """Node -> slots that it could hold if nothing else used it."""
        free_slots = {node.host: cores_of(node) // self.own_cores for node in self._nodes} if self.own_cores else {}
        capacities = {}
        for node in self._nodes:
            capacities[node.name] = _fitting(self._settings.bundle, node.resources)
            if self.own_cores:
                capacities[node.name] = min(capacities[node.name], free_slots[node.host])
                free_slots[node.host] -= capacities[node.name]
        return capacities

    def spare_capacities(self) -> dict[str, int]:
        """Node -> further slots that it can hold now."""
        self._view()
        now = time.monotonic()
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
        self._viewed_at = -VIEW_SECONDS
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
        self._viewed_at = -VIEW_SECONDS
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
        lacking = "; ".join(short or [f"no node has room for {_listed(self._settings.bundle)}"])
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

    @property
    def _nodes(self) -> list[Node]:
        return list(self._tracker.nodes.values())

    def _view(self) -> None:
        if time.monotonic() - self._viewed_at >= VIEW_SECONDS:
            self._free = ray._private.state.available_resources_per_node()
            self._viewed_at = time.monotonic()

    def _free_cores(self, node: Node) -> tuple[int, ...] | None:
        if not self.own_cores:
            return None
        used_cores = {core for slot in self.slots if slot.node.host == node.host for core in slot.cores or ()}
        return tuple(itertools.islice((core for core in itertools.count() if core not in used_cores), self.own_cores))


def cores_of(node: Node) -> int:
    """Return the cores that ranks on the node can use: counted on this machine, as configured in Ray on others."""
    if node.host == socket.gethostname():
        return len(os.sched_getaffinity(0))
    return int(node.resources.get("CPU", 0))


def _fitting(bundle: Mapping[str, float], resources: Mapping[str, float]) -> int:
    return min(int(resources.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items() if amount > 0)


def _listed(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def _give_back(slots: list[RankSlot]) -> None:
    for group in {slot.group.id: slot.group for slot in slots}.values():
        remove_placement_group(group)
