"""Rank slots on the nodes, each a Ray actor with a rank process as its child, and the transport of a gang on them."""

import collections
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from executor import process_tree
from executor.errors import RunnerError
from executor.runners import rank_process
from executor.runners.ray import actor
from executor.runners.ray.actor import CONTROL, RankActor
from executor.runners.ray.nodes import RayNode
from executor.runners.transport import NO_VARIABLES, RANK_MAIN, Death, Message, MessageKind, RankTransport, decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSettings:
    """Settings that are the same for every slot of a runner."""

    bundle: Mapping[str, float]
    """Ray resources of a rank."""
    environment: Mapping[str, str]
    """Added to the environment of the rank processes."""
    trial_function: str


class RankSlot:
    """A slot for a rank. Its rank process outlives the gangs that use it. Used from one thread."""

    def __init__(
        self,
        settings: SlotSettings,
        node: RayNode,
        group: PlacementGroup,
        index: int,
        cores: tuple[int, ...] | None,
        mailbox: "Mailbox",
    ) -> None:
        self.node = node
        self.group = group
        self.cores = cores
        """Indices of this slot's exclusive cores on its host; None: it is not bound to cores."""
        self.inbox: collections.deque[Message | Death] = collections.deque(maxlen=10_000)  # the slot may not be read
        self.out_of_reach = False
        """Whether the actor has been lost, and its rank process with it."""
        self.trials = 0
        """Number of trials of its rank process."""
        self.settings = settings
        self._index = index
        self._mailbox = mailbox
        self._actor: Any = None
        self._generation = 0
        self._stream: Any = None
        self._options: Mapping[str, Any] = {}
        self._ready: Message | None = None

    @property
    def is_up(self) -> bool:
        """Whether there is a rank process, as far as known."""
        return self._stream is not None

    def start(self, python_path: Sequence[str], sharing: int, variables: Mapping[str, str] = NO_VARIABLES) -> bool:
        """Ensure a rank process with this path and these variables, whose cores `sharing` ranks share; return whether a running
        one is reused.

        The `ready` message of a reused process is delivered again.
        """
        environment = {**self.settings.environment, **variables}
        options = {"trial_function": self.settings.trial_function, "python_path": list(python_path), "environment": environment}
        if self.is_up and options == self._options:
            self.inbox.clear()
            if self._ready is not None:
                self.inbox.append(self._ready)
            return True
        self.request_end()
        if self._actor is None:
            self._actor = self._start_actor()
        self.inbox.clear()
        self._generation, self._options, self._ready = self._generation + 1, options, None
        self.trials, self.out_of_reach = 0, False
        run = self._actor.run_rank.options(num_returns="streaming")
        self._stream = run.remote(self._generation, RANK_MAIN, options, self.node.address, self.cores, sharing)
        self._mailbox.open(self._stream, self)
        return False

    def send(self, message: Message) -> None:
        """Send a message to the rank; ignored if the rank is dead."""
        if self._actor is not None:
            self._actor.send.options(concurrency_group=CONTROL).remote(encode(message))

    def request_end(self) -> Any:
        """Request the end of the rank and stop receiving; return the call, which completes when it is gone. None: no rank."""
        if self._stream is not None:
            self._mailbox.drop(self._stream)
            self._stream = None
        return None if self._actor is None else self._actor.kill.options(concurrency_group=CONTROL).remote(self._generation)

    def request_stacks(self, seconds: float) -> Any:
        """Request the rank's thread stacks; return the call. None: no rank."""
        if self._actor is None or not self.is_up:
            return None
        return self._actor.stacks.options(concurrency_group=CONTROL).remote(seconds)

    def end_actor(self) -> None:
        """Kill the actor, and the rank with it; `start` creates a new one in the same slot."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None

    def receive_next(self) -> None:
        """Take the next item of the stream. A stream that ends has reported the rank's death; if it fails, the rank is out of
        reach."""
        try:
            item = ray.get(next(self._stream))
        except StopIteration:
            self._close_stream()
        except ray.exceptions.RayTaskError as error:
            self._close_stream()
            raise RunnerError(f"a rank cannot be run on node {self.node.name}: {error.cause}") from error
        except ray.exceptions.RayError as error:
            self._close_stream()
            self.end_actor()
            self.out_of_reach = True
            self._mailbox.unreachable.append(self)
            self.inbox.append(Death(output=str(error)))
        else:
            self._take(item)

    def _take(self, item: bytes | tuple[int, str, bool]) -> None:
        if not isinstance(item, bytes):
            self.inbox.append(Death(exit_code=item[0], output=item[1], out_of_memory_kill=item[2]))
            return
        message = decode(item)
        if message["kind"] == MessageKind.READY:
            # Fake nodes share a machine, but the ranks of each are counted separately.
            message = self._ready = {**message, "host": self.node.name}
        self.inbox.append(message)

    def _close_stream(self) -> None:
        self._mailbox.drop(self._stream)
        self._stream = None

    def _start_actor(self) -> Any:
        for module in (actor, rank_process, process_tree):
            ray.cloudpickle.register_pickle_by_value(module)
        remote = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={CONTROL: 1})(RankActor)
        bundle = self.settings.bundle
        return remote.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self._index),
        ).remote()


class Mailbox:
    """The streams of all slots, so that a single wait covers them all."""

    def __init__(self) -> None:
        self._streams: dict[Any, RankSlot] = {}
        self.unreachable: list[RankSlot] = []
        """Slots whose actors are out of reach; the caller that handles them removes them."""

    def open(self, stream: Any, slot: RankSlot) -> None:
        """Start receiving a stream of this slot."""
        self._streams[stream] = slot

    def drop(self, stream: Any) -> None:
        """Stop receiving a stream."""
        self._streams.pop(stream, None)

    def collect(self, timeout: float) -> None:
        """Put new messages into the inboxes, waiting up to `timeout` seconds for the first.

        Raises:
            RunnerError: a node cannot run a rank at all.
        """
        if not self._streams:
            time.sleep(timeout)
        while self._streams:
            ready, _ = ray.wait(list(self._streams), num_returns=1, timeout=timeout)
            if not ready:
                return
            self._streams[ready[0]].receive_next()
            timeout = 0.0


def stacks_of(slots: Iterable[RankSlot], seconds: float) -> dict[RankSlot, str]:
    """Return the thread stacks of these slots' ranks, requested together, without ranks that do not answer in time."""
    calls = {call: slot for slot in slots if (call := slot.request_stacks(seconds)) is not None}
    # Round-trip time of a call to an actor.
    answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=seconds + 0.5) if calls else ([], [])
    stacks = {}
    for call in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            stacks[calls[call]] = ray.get(call)
    return {slot: text for slot, text in stacks.items() if text}


def end_ranks(slots: Iterable[RankSlot]) -> None:
    """End the ranks of these slots together. On return none is left on a node that can be reached."""
    calls = {call: slot for slot in slots if (call := slot.request_end()) is not None}
    if not calls:
        return
    # Time for an actor to end its rank. After that the actor itself is killed, and the system kills the rank with it.
    ended, late = ray.wait(list(calls), num_returns=len(calls), timeout=5.0)
    for call in ended:
        try:
            ray.get(call)
        except ray.exceptions.RayError:
            late.append(call)
    for call in late:
        calls[call].end_actor()


class SlotTransport(RankTransport):
    """Ranks on slots, numbered in the order of the slots. Existing rank processes of a slot are reused.

    `sharing`: host -> ranks that share its cores; None: the ranks of this gang. `mailbox` is that of the slots.
    """

    def __init__(self, slots: Sequence[RankSlot], mailbox: Mailbox, sharing: Mapping[str, int] | None = None) -> None:
        self.world_size = len(slots)
        self.address = slots[0].node.address
        self.slots = tuple(slots)
        self._mailbox = mailbox
        self._sharing = sharing or Counter(slot.node.host for slot in slots)
        self._threads_are_set = "OMP_NUM_THREADS" in slots[0].settings.environment

    def start(self, python_path: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES) -> None:
        """Ensure a process in every slot; see `RankTransport`."""
        # A slot with its own cores does not share them.
        sharing = [1 if slot.cores else self._sharing[slot.node.host] for slot in self.slots]
        stayed = [slot.start(python_path, share, variables) for slot, share in zip(self.slots, sharing, strict=True)]
        self.reused = any(stayed)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank; see `RankTransport`."""
        slot = self.slots[rank]
        if message["kind"] == MessageKind.JOIN and slot.cores is None and not self._threads_are_set:
            # A process that is reused from a gang of another size now has another share of its host's cores.
            message = {**message, "cores_shared_by": self._sharing[slot.node.host]}
        slot.send(message)

    def receive(self, timeout: float) -> list[tuple[int, Message | Death]]:
        """Return the new messages; see `RankTransport`. Without a timeout: those that the mailbox has collected."""
        if timeout and not any(slot.inbox for slot in self.slots):
            self._mailbox.collect(timeout)
        received = []
        for rank, slot in enumerate(self.slots):
            while slot.inbox:
                received.append((rank, slot.inbox.popleft()))
        return received

    def renumber(self, order: Sequence[int]) -> None:
        """Number the slots anew; see `RankTransport`."""
        self.slots = tuple(self.slots[rank] for rank in order)

    def node_of(self, rank: int) -> str:
        """Return the name of the rank's node; see `RankTransport`."""
        return self.slots[rank].node.name

    def stacks(self, seconds: float) -> Mapping[int, str]:
        """Return the ranks' stacks; see `RankTransport`."""
        stacks = stacks_of(self.slots, seconds)
        return {rank: stacks[slot] for rank, slot in enumerate(self.slots) if slot in stacks}

    def kill(self) -> None:
        """End every rank; see `RankTransport`."""
        end_ranks(self.slots)

    def close(self) -> None:
        """End every rank; see `RankTransport`. The slots belong to the pool."""
        self.kill()
