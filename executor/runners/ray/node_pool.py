"""What the nodes of a Ray cluster have room for, and the seats that are reserved on them."""

import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from executor.runners.ray.nodes import Node, NodeWatch
from executor.runners.ray.rank_slots import Mailbox, RankSlot, SeatTerms, end_ranks

RESERVE_SECONDS = 2.0
"""Time for Ray to reserve what it told to be free."""
REFUSED_SECONDS = 10.0
"""How long a node counts as full on which something could not be reserved."""
VIEW_SECONDS = 1.0
"""How old the view of what others have taken may be."""
NODE_LABEL = "ray.io/node-id"


class NodePool:
    """Seats on the nodes, made where they are wanted and kept until the end. Used from one thread.

    `own_cores`: cores that each seat has to itself; 0: seats are bound to none.
    """

    def __init__(self, terms: SeatTerms, watch: NodeWatch, post: Mailbox, own_cores: int = 0) -> None:
        self._terms = terms
        self._watch = watch
        self._post = post
        self.own_cores = own_cores
        self.seats: list[RankSlot] = []
        self._full_until: dict[str, float] = {}
        self._free: Mapping[str, Mapping[str, float]] = {}
        self._viewed_at = -VIEW_SECONDS

    def whole(self) -> dict[str, int]:
        """Node -> seats that it could hold if nobody else used it."""
        left = {node.host: cores_of(node) // self.own_cores for node in self._nodes} if self.own_cores else {}
        rooms = {}
        for node in self._nodes:
            rooms[node.name] = _fitting(self._terms.bundle, node.resources)
            if self.own_cores:
                rooms[node.name] = min(rooms[node.name], left[node.host])
                left[node.host] -= rooms[node.name]
        return rooms

    def growth(self) -> dict[str, int]:
        """Node -> further seats that it has room for now."""
        self._view()
        now = time.monotonic()
        mine = Counter(seat.node.name for seat in self.seats)
        rooms = {}
        for name, whole in self.whole().items():
            # Ray tells late of what was taken just now, so what is ours is counted by ourselves.
            free = _fitting(self._terms.bundle, self._free.get(self._watch.nodes[name].node_id, {}))
            full = now < self._full_until.get(name, 0.0)
            rooms[name] = 0 if full else max(0, min(whole - mine[name], free))
        return rooms

    def grow(self, name: str, count: int) -> list[RankSlot]:
        """Reserve `count` further seats on a node; none where Ray does not give them."""
        node = self._watch.nodes[name]
        bundles = [dict(self._terms.bundle) for _ in range(count)]
        selector = [{NODE_LABEL: node.node_id} for _ in range(count)]
        group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=selector)
        if not group.wait(RESERVE_SECONDS):
            remove_placement_group(group)
            self._full_until[name] = time.monotonic() + REFUSED_SECONDS
            return []
        self._viewed_at = -VIEW_SECONDS
        made = []
        for index in range(count):
            made.append(RankSlot(self._terms, node, group, index, self._free_cores(node), self._post))
            self.seats.append(made[-1])
        return made

    def await_room(self, world_size: int, seconds: float) -> bool:
        """Wait until Ray has room for so many ranks; return whether it has. What is asked for is what an autoscaler goes by."""
        group = placement_group([dict(self._terms.bundle) for _ in range(world_size)], strategy="PACK")
        there = bool(group.wait(seconds))
        remove_placement_group(group)
        self._viewed_at = -VIEW_SECONDS
        self._watch.look()
        return there

    def missing(self, world_size: int, seconds: float) -> str:
        """One line: what a gang of so many ranks lacks."""
        total, free = ray.cluster_resources(), ray.available_resources()
        short = []
        for name, amount in self._terms.bundle.items():
            has = free.get(name, 0.0) + len(self.seats) * amount
            if world_size * amount > has:
                short.append(f"{world_size * amount:g} {name} wanted, {has:g} free of {total.get(name, 0):g}")
        told = "; ".join(short or [f"no node has room for {_listed(self._terms.bundle)}"])
        return f"{world_size} ranks cannot be placed on Ray within {seconds:g} s: {told}; give fewer ranks or add nodes"

    def drop(self, name: str) -> None:
        """Forget the seats of a node that is gone."""
        gone = [seat for seat in self.seats if seat.node.name == name]
        self.seats = [seat for seat in self.seats if seat.node.name != name]
        for seat in gone:
            seat.ask_to_end()  # a node that is only cut off ends it when it hears of it
            seat.end_actor()
        _give_back(gone)

    def close(self) -> None:
        """End every rank and actor, and give the reservations back."""
        seats, self.seats = self.seats, []
        if not ray.is_initialized():  # it has taken all of them along
            return
        end_ranks(seats)
        for seat in seats:
            seat.end_actor()
        _give_back(seats)

    @property
    def _nodes(self) -> list[Node]:
        return list(self._watch.nodes.values())

    def _view(self) -> None:
        if time.monotonic() - self._viewed_at >= VIEW_SECONDS:
            self._free = ray._private.state.available_resources_per_node()
            self._viewed_at = time.monotonic()

    def _free_cores(self, node: Node) -> tuple[int, ...] | None:
        if not self.own_cores:
            return None
        taken = {core for seat in self.seats if seat.node.host == node.host for core in seat.cores or ()}
        return tuple(itertools.islice((core for core in itertools.count() if core not in taken), self.own_cores))


def cores_of(node: Node) -> int:
    """Cores that ranks on the node can use: counted on this machine, as told to Ray elsewhere."""
    if node.host == socket.gethostname():
        return len(os.sched_getaffinity(0))
    return int(node.resources.get("CPU", 0))


def _fitting(bundle: Mapping[str, float], resources: Mapping[str, float]) -> int:
    return min(int(resources.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items() if amount > 0)


def _listed(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def _give_back(seats: list[RankSlot]) -> None:
    for group in {seat.group.id: seat.group for seat in seats}.values():
        remove_placement_group(group)
