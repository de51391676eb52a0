"""Seats: places for ranks on the nodes, each with a Ray actor that holds its resources and a rank process below it."""

import collections
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from executor import process_tree
from executor.engines import leftovers
from executor.errors import RunnerError
from executor.runners import head_and_tail, rank_environment, rank_output, rank_process
from executor.runners.messages import Kind, Message, decode, encode
from executor.runners.ray import actor
from executor.runners.ray.actor import CONTROL, RankActor
from executor.runners.ray.nodes import Node
from executor.runners.transport import NO_VARIABLES, RANK_MAIN, Death

KILL_SECONDS = 5.0
"""Time for an actor to end its rank; then the actor itself is killed, and the system kills the rank with it."""
CALL_SECONDS = 0.5
"""Time for a call to an actor and back."""
MOST_UNHEARD = 10_000
"""Messages that are kept of a rank that nobody listens to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatTerms:
    """What is the same for every seat of a runner."""

    bundle: Mapping[str, float]
    """Ray resources of a rank."""
    environment: Mapping[str, str]
    """Added to that of the rank processes."""
    trial_function: str


class RankSlot:
    """A rank's place. Its rank process outlives the gangs that it is in. Used from one thread."""

    def __init__(
        self, terms: SeatTerms, node: Node, group: PlacementGroup, index: int, cores: tuple[int, ...] | None, post: "Mailbox"
    ) -> None:
        self.node = node
        self.group = group
        self.cores = cores
        """Numbers among the cores of its host that are this seat's alone; None: it is not bound to any."""
        self.inbox: collections.deque[Message | Death] = collections.deque(maxlen=MOST_UNHEARD)
        self.out_of_reach = False
        """Whether the actor was found to be gone, and its rank process with it."""
        self.trials = 0
        """That its rank process has been given."""
        self._terms = terms
        self._index = index
        self._post = post
        self._actor: Any = None
        self._life = 0
        self._stream: Any = None
        self._options: Mapping[str, Any] = {}
        self._ready: Message | None = None

    @property
    def is_up(self) -> bool:
        """Whether there is a rank process, as far as is known."""
        return self._stream is not None

    def start(self, python_path: Sequence[str], sharing: int, variables: Mapping[str, str] = NO_VARIABLES) -> bool:
        """Have a rank process for this path and with these variables, whose cores `sharing` ranks share; return whether one
        that was up stays.

        One that stays has said that it is ready: that is heard again.
        """
        environment = {**self._terms.environment, **variables}
        options = {"trial_function": self._terms.trial_function, "python_path": list(python_path), "environment": environment}
        if self.is_up and options == self._options:
            self.inbox.clear()
            if self._ready is not None:
                self.inbox.append(self._ready)
            return True
        self.ask_to_end()
        if self._actor is None:
            self._actor = self._start_actor()
        self.inbox.clear()
        self._life, self._options, self._ready = self._life + 1, options, None
        self.trials, self.out_of_reach = 0, False
        run = self._actor.run_rank.options(num_returns="streaming")
        self._stream = run.remote(self._life, RANK_MAIN, options, self.node.address, self.cores, sharing)
        self._post.open(self._stream, self)
        return False

    def send(self, message: Message) -> None:
        """Send to the rank; to one that is dead: ignored."""
        if self._actor is not None:
            self._actor.send.options(concurrency_group=CONTROL).remote(encode(message))

    def ask_to_end(self) -> Any:
        """Have the rank ended, and hear it no more; return the call, which is over when it is gone. None: there is no rank."""
        if self._stream is not None:
            self._post.drop(self._stream)
            self._stream = None
        return None if self._actor is None else self._actor.kill.options(concurrency_group=CONTROL).remote(self._life)

    def ask_for_stacks(self, seconds: float) -> Any:
        """Have the rank print where its threads stand; return the call. None: there is no rank."""
        if self._actor is None or not self.is_up:
            return None
        return self._actor.stacks.options(concurrency_group=CONTROL).remote(seconds)

    def end_actor(self) -> None:
        """End the actor, and the rank with it; `start` makes a new one in the same place."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None

    def hear(self) -> None:
        """Take the next item of the stream. One that ends has told the rank's death; one that breaks: it is out of reach."""
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
            self._post.broken.append(self)
            self.inbox.append(Death(output=str(error)))
        else:
            self._take(item)

    def _take(self, item: bytes | tuple[int, str, bool]) -> None:
        if not isinstance(item, bytes):
            self.inbox.append(Death(exit_code=item[0], output=item[1], out_of_memory_kill=item[2]))
            return
        message = decode(item)
        if message["kind"] == Kind.READY:
            # Fake nodes are on one machine, but the ranks of each are counted by themselves.
            message = self._ready = {**message, "host": self.node.name}
        self.inbox.append(message)

    def _close_stream(self) -> None:
        self._post.drop(self._stream)
        self._stream = None

    def _start_actor(self) -> Any:
        for module in (actor, rank_process, rank_environment, rank_output, head_and_tail, process_tree, leftovers):
            ray.cloudpickle.register_pickle_by_value(module)
        remote = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={CONTROL: 1})(RankActor)
        bundle = self._terms.bundle
        return remote.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self._index),
        ).remote()


class Mailbox:
    """The streams of all seats, so that one wait hears them all."""

    def __init__(self) -> None:
        self._streams: dict[Any, RankSlot] = {}
        self.broken: list[RankSlot] = []
        """Seats whose actors were found to be out of reach; whoever looks into it takes them out."""

    def open(self, stream: Any, seat: RankSlot) -> None:
        """Listen to a stream of this seat."""
        self._streams[stream] = seat

    def drop(self, stream: Any) -> None:
        """Listen to it no more."""
        self._streams.pop(stream, None)

    def collect(self, timeout: float) -> None:
        """Put what came into the inboxes, waiting up to `timeout` seconds for the first.

        Raises:
            RunnerError: a node cannot run a rank at all.
        """
        if not self._streams:
            time.sleep(timeout)
        while self._streams:
            ready, _ = ray.wait(list(self._streams), num_returns=1, timeout=timeout)
            if not ready:
                return
            self._streams[ready[0]].hear()
            timeout = 0.0


def stacks_of(seats: Iterable[RankSlot], seconds: float) -> dict[RankSlot, str]:
    """Where the threads of the ranks of these seats stand, asked together; without those that do not tell within the time."""
    calls = {call: seat for seat in seats if (call := seat.ask_for_stacks(seconds)) is not None}
    told, _ = ray.wait(list(calls), num_returns=len(calls), timeout=seconds + CALL_SECONDS) if calls else ([], [])
    found = {}
    for call in told:
        with contextlib.suppress(ray.exceptions.RayError):
            found[calls[call]] = ray.get(call)
    return {seat: text for seat, text in found.items() if text}


def end_ranks(seats: Iterable[RankSlot]) -> None:
    """End the ranks of these seats together; none is left on return, where its node can be reached."""
    calls = {call: seat for seat in seats if (call := seat.ask_to_end()) is not None}
    if not calls:
        return
    ended, late = ray.wait(list(calls), num_returns=len(calls), timeout=KILL_SECONDS)
    for call in ended:
        try:
            ray.get(call)
        except ray.exceptions.RayError:
            late.append(call)
    for call in late:
        calls[call].end_actor()
