"""Forms gangs from a cluster's slots, and keeps track of those that run and those that are kept for the next trial."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executor.runners.gang import Gang
from executor.runners.layout import Layout, lay_out, lay_out_kinds, without
from executor.runners.ray.node_pool import NodePool
from executor.runners.ray.nodes import NodeTracker
from executor.runners.ray.rank_slots import Mailbox, RankSlot, SlotTransport
from executor.runners.runner import Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSettings:
    """Settings that are the same for every gang."""

    python_path: tuple[str, ...]
    device: str
    environment: Mapping[str, str]
    """Environment of the rank processes, in addition to the node's."""
    exclusive: bool
    """Whether one gang runs at a time: its ranks share the cores of their hosts with no other gang."""


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


def _match_kinds(slots: Sequence[RankSlot], kinds: Kinds) -> bool:
    """Whether the nodes of consecutive slots have these kinds."""
    kind_by_rank = [kind for kind, ranks in kinds for _ in range(ranks)]
    return all(slot.node.resources.get(kind) for slot, kind in zip(slots, kind_by_rank, strict=bool(kinds)))


class Formation:
    """Forms gangs. The same slots give the same gang; a gang of other slots reuses their rank processes."""

    def __init__(self, settings: GangSettings, node_pool: NodePool, tracker: NodeTracker, mailbox: Mailbox) -> None:
        self._settings = settings
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
        for formed in self.idle:
            shares = formed.shares
            whole = all(share % block == 0 for share in shares.values())
            fits = len(formed.slots) == world_size and not shares.keys() & set(excluded)
            if fits and whole and (layout is None or len(shares) <= len(layout)) and _match_kinds(formed.slots, kinds):
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
        settings = self._settings
        transport = SlotTransport(slots, self._mailbox, settings.environment, None if settings.exclusive else self._sharing())
        return FormedGang(Gang(transport, python_path=settings.python_path, device=settings.device), tuple(slots))

    def _free_slots(self) -> list[RankSlot]:
        busy = {slot for formed in self.running.values() for slot in formed.slots}
        return [slot for slot in self._node_pool.slots if slot not in busy]

    def _sharing(self) -> Mapping[str, int]:
        """Host -> ranks that share its cores: as many as it can hold."""
        sharing: Counter[str] = Counter()
        for name, capacity in self._node_pool.total_capacities().items():
            sharing[self._tracker.nodes[name].host] += max(1, capacity)
        return sharing
