"""The transport of a gang on slots."""

from collections import Counter
from collections.abc import Mapping, Sequence

from executor.runners.messages import Kind, Message
from executor.runners.ray.rank_slots import Mailbox, RankSlot, end_ranks, stacks_of
from executor.runners.transport import NO_VARIABLES, Death, Transport

THREADS = "OMP_NUM_THREADS"


class SlotTransport(Transport):
    """Ranks on slots, numbered in the order of the slots. Existing rank processes of a slot are reused.

    `sharing`: host -> ranks that share its cores; None: the ranks of this gang. `mailbox` is that of the slots.
    """

    def __init__(
        self,
        slots: Sequence[RankSlot],
        mailbox: Mailbox,
        environment: Mapping[str, str],
        sharing: Mapping[str, int] | None = None,
    ) -> None:
        self.world_size = len(slots)
        self.address = slots[0].node.address
        self.slots = tuple(slots)
        self._mailbox = mailbox
        self._sharing = sharing or Counter(slot.node.host for slot in slots)
        self._threads_are_set = THREADS in environment

    def start(self, python_path: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES) -> None:
        """Ensure a process in every slot; see `Transport`."""
        # A slot with its own cores does not share them.
        sharing = [1 if slot.cores else self._sharing[slot.node.host] for slot in self.slots]
        stayed = [slot.start(python_path, share, variables) for slot, share in zip(self.slots, sharing, strict=True)]
        self.reused = any(stayed)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank; see `Transport`."""
        slot = self.slots[rank]
        if message["kind"] == Kind.JOIN and slot.cores is None and not self._threads_are_set:
            # A process that is reused from a gang of another size now has another share of its host's cores.
            message = {**message, "cores_shared_by": self._sharing[slot.node.host]}
        slot.send(message)

    def receive(self, timeout: float) -> list[tuple[int, Message | Death]]:
        """Return the new messages; see `Transport`. Without a timeout: those that the mailbox has collected."""
        if timeout and not any(slot.inbox for slot in self.slots):
            self._mailbox.collect(timeout)
        received = []
        for rank, slot in enumerate(self.slots):
            while slot.inbox:
                received.append((rank, slot.inbox.popleft()))
        return received

    def node_of(self, rank: int) -> str:
        """Return the name of the rank's node; see `Transport`."""
        return self.slots[rank].node.name

    def stacks(self, seconds: float) -> Mapping[int, str]:
        """Return the ranks' stacks; see `Transport`."""
        stacks = stacks_of(self.slots, seconds)
        return {rank: stacks[slot] for rank, slot in enumerate(self.slots) if slot in stacks}

    def kill(self) -> None:
        """End every rank; see `Transport`."""
        end_ranks(self.slots)

    def close(self) -> None:
        """End every rank; see `Transport`. The slots belong to the pool."""
        self.kill()
