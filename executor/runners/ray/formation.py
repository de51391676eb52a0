"""The gangs that are formed of a cluster's seats: those that run, and those that are kept as they are for the next trial."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executor.runners.gang import Gang
from executor.runners.layout import Layout, lay_out, lay_out_kinds, without
from executor.runners.ray.node_pool import NodePool
from executor.runners.ray.nodes import NodeWatch
from executor.runners.ray.rank_slots import Mailbox, RankSlot
from executor.runners.ray.transport import SeatTransport
from executor.runners.runner import Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class GangTerms:
    """What is the same for every gang."""

    python_path: tuple[str, ...]
    device: str
    environment: Mapping[str, str]
    """That of the rank processes, beside the node's."""
    alone: bool
    """Whether there is one gang at a time: its ranks share the cores of their hosts with no others."""


@dataclass(frozen=True, slots=True, eq=False)
class Formed:
    """A gang and its seats, in the order of its ranks."""

    gang: Gang
    seats: tuple[RankSlot, ...]

    @property
    def shares(self) -> Mapping[str, int]:
        """Node -> ranks on it."""
        return Counter(seat.node.name for seat in self.seats)


Kinds = Sequence[tuple[str, int]]
"""As `TrialRequest.node_kinds`."""


def _are(seats: Sequence[RankSlot], kinds: Kinds) -> bool:
    """Whether the seats of consecutive ranks are on nodes of these kinds."""
    wanted = [kind for kind, ranks in kinds for _ in range(ranks)]
    return all(seat.node.resources.get(kind) for seat, kind in zip(seats, wanted, strict=bool(kinds)))


class Formation:
    """Forms gangs. A gang of the same seats is the same gang; one of other seats takes their rank processes as they are."""

    def __init__(self, terms: GangTerms, ground: NodePool, watch: NodeWatch, post: Mailbox) -> None:
        self._terms = terms
        self._ground = ground
        self._watch = watch
        self._post = post
        self.idle: list[Formed] = []
        """The one that ran last first."""
        self.running: dict[Handle, Formed] = {}

    def rooms(self) -> dict[str, int]:
        """Node -> ranks that it can take now: free seats, and what can be added. Nodes with more free seats first."""
        free = Counter(seat.node.name for seat in self._free_seats())
        growth = self._ground.growth()
        return {name: free[name] + growth[name] for name in sorted(growth, key=lambda name: (-free[name], name))}

    def layout(self, world_size: int, block: int, kinds: Kinds, rooms: Mapping[str, int]) -> Layout | None:
        """Where so many ranks go; `kinds`: on which nodes, where they differ."""
        if not kinds:
            return lay_out(world_size, block, rooms)
        return lay_out_kinds(kinds, block, rooms, {name: node.resources for name, node in self._watch.nodes.items()})

    def take(self, world_size: int, block: int, excluded: Sequence[str], kinds: Kinds = ()) -> Formed | None:
        """A gang of so many ranks, each block of them on one node, that is free now; None: there is no room."""
        layout = self.layout(world_size, block, kinds, without(excluded, self.rooms()))
        kept = self._kept(world_size, block, excluded, layout, kinds)
        if kept is not None:
            self.idle.remove(kept)
        return kept or (None if layout is None else self._form(layout))

    def prepare(self, world_size: int, most: int) -> list[Formed]:
        """Form up to `most` gangs of so many ranks ahead, as far as there is room; they are idle."""
        handles = [f"ahead-{number}" for number in range(most)]
        for handle in handles:
            formed = self.take(world_size, 1, ())
            if formed is None:
                break
            self.running[handle] = formed
        return [self.give_back(handle) for handle in handles if handle in self.running]

    def give_back(self, handle: Handle) -> Formed:
        """The gang whose attempt has ended, which is kept."""
        formed = self.running.pop(handle)
        self.idle.insert(0, formed)
        return formed

    def forget(self, name: str) -> None:
        """Take apart the idle gangs that have ranks on a node."""
        self.idle = [formed for formed in self.idle if name not in formed.shares]

    def _kept(self, world_size: int, block: int, excluded: Sequence[str], layout: Layout | None, kinds: Kinds) -> Formed | None:
        """An idle gang that serves as it is, on no more nodes than a new one would be."""
        for formed in self.idle:
            shares = formed.shares
            whole = all(share % block == 0 for share in shares.values())
            fits = len(formed.seats) == world_size and not shares.keys() & set(excluded)
            if fits and whole and (layout is None or len(shares) <= len(layout)) and _are(formed.seats, kinds):
                return formed
        return None

    def _form(self, layout: Layout) -> Formed | None:
        """A new gang; None: there is no room after all. Idle gangs that share seats with it are taken apart."""
        seats: list[RankSlot] = []
        for name, count in layout:
            # Those with a rank process first; else in their order, so that gangs stay the same.
            free = sorted((seat for seat in self._free_seats() if seat.node.name == name), key=lambda seat: not seat.is_up)
            if len(free) < count:
                free += self._ground.grow(name, count - len(free))
            if len(free) < count:
                return None
            seats += free[:count]
        self.idle = [formed for formed in self.idle if not set(formed.seats) & set(seats)]
        terms = self._terms
        transport = SeatTransport(seats, self._post, terms.environment, None if terms.alone else self._sharing())
        return Formed(Gang(transport, python_path=terms.python_path, device=terms.device), tuple(seats))

    def _free_seats(self) -> list[RankSlot]:
        busy = {seat for formed in self.running.values() for seat in formed.seats}
        return [seat for seat in self._ground.seats if seat not in busy]

    def _sharing(self) -> Mapping[str, int]:
        """Host -> ranks that share its cores: all that can be there."""
        sharing: Counter[str] = Counter()
        for name, room in self._ground.whole().items():
            sharing[self._watch.nodes[name].host] += max(1, room)
        return sharing
