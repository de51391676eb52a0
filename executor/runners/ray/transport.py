"""The seats of a gang as its transport."""

from collections import Counter
from collections.abc import Mapping, Sequence

from executor.runners.messages import Kind, Message
from executor.runners.ray.rank_slots import Mailbox, RankSlot, end_ranks, stacks_of
from executor.runners.transport import NO_VARIABLES, Death, Transport

THREADS = "OMP_NUM_THREADS"


class SeatTransport(Transport):
    """Ranks on seats, numbered in their order. Rank processes that a seat has already are taken as they are.

    `sharing`: ranks that share the cores of a host, by its name; None: those of this gang do. `post` is that of the seats.
    """

    def __init__(
        self, seats: Sequence[RankSlot], post: Mailbox, environment: Mapping[str, str], sharing: Mapping[str, int] | None = None
    ) -> None:
        self.world_size = len(seats)
        self.address = seats[0].node.address
        self.seats = tuple(seats)
        self._post = post
        self._sharing = sharing or Counter(seat.node.host for seat in seats)
        self._threads_are_told = THREADS in environment

    def start(self, python_path: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES) -> None:
        """Have a process in every seat; see `Transport`."""
        # A seat with cores of its own shares them with nobody.
        sharing = [1 if seat.cores else self._sharing[seat.node.host] for seat in self.seats]
        stayed = [seat.start(python_path, share, variables) for seat, share in zip(self.seats, sharing, strict=True)]
        self.reused = any(stayed)

    def send(self, rank: int, message: Message) -> None:
        """Send to a rank; see `Transport`."""
        seat = self.seats[rank]
        if message["kind"] == Kind.JOIN and seat.cores is None and not self._threads_are_told:
            # A process that stays from a gang of another size has another share of its host's cores now.
            message = {**message, "cores_shared_by": self._sharing[seat.node.host]}
        seat.send(message)

    def receive(self, timeout: float) -> list[tuple[int, Message | Death]]:
        """What came; see `Transport`. Without a timeout: what the post has collected."""
        if timeout and not any(seat.inbox for seat in self.seats):
            self._post.collect(timeout)
        heard = []
        for rank, seat in enumerate(self.seats):
            while seat.inbox:
                heard.append((rank, seat.inbox.popleft()))
        return heard

    def node_of(self, rank: int) -> str:
        """The name of the rank's node; see `Transport`."""
        return self.seats[rank].node.name

    def stacks(self, seconds: float) -> Mapping[int, str]:
        """Where the ranks stand; see `Transport`."""
        told = stacks_of(self.seats, seconds)
        return {rank: told[seat] for rank, seat in enumerate(self.seats) if seat in told}

    def kill(self) -> None:
        """End every rank; see `Transport`."""
        end_ranks(self.seats)

    def close(self) -> None:
        """End every rank; see `Transport`. The seats are the pool's."""
        self.kill()
