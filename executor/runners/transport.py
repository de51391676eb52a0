"""The interface between a gang and its rank processes, wherever they run, and the protocol between them: JSON objects with a
`kind`, nothing pickled.

    parent                                     rank
       │ ◄──────────────────────────── ready    its code is imported
       │ join ────────────────────────►         rank 0 first
       │ ◄──────────────────────── listening    rank 0 has bound the rendezvous port; then the others are asked to join
       │ ◄─────────────────────────── joined    every rank
       │ run ─────────────────────────►         every rank, once a trial
       │ ◄───────────────── progress or beat    any number; beats from every rank, twice a second
       │ ◄────────────────────────── output    any number; `RankProcess` makes them of what the rank prints
       │ ◄───────────── result or failure       exactly one for each run, unless the rank dies
       │ abort ───────────────────────►         after another rank's failure: a thread of its own ends what it waits for
       │ ◄─────────────────────────── rested    what the rank still holds after releasing what it can

`measure` asks for a micro-benchmark where `run` asks for a trial. `describe` (answered by `described` or `failure`) needs no
`join`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

Message = dict[str, Any]


class MessageKind(StrEnum):
    """The `kind` of a message."""

    READY = "ready"
    JOIN = "join"
    LISTENING = "listening"
    JOINED = "joined"
    RUN = "run"
    ABORT = "abort"
    MEASURE = "measure"
    PROGRESS = "progress"
    OUTPUT = "output"
    BEAT = "beat"
    RESTED = "rested"
    RESULT = "result"
    FAILURE = "failure"
    DESCRIBE = "describe"
    DESCRIBED = "described"


def encode(message: Message) -> bytes:
    """Encode a message for the pipe.

    Raises:
        TypeError: a value that is not plain data.
    """
    return json.dumps(message).encode()


def decode(data: bytes) -> Message:
    """Decode a message that `encode` has encoded."""
    return json.loads(data)  # type: ignore[no-any-return]


RANK_MAIN = str(Path(__file__).with_name("rank_main.py"))
RUN_TRIAL = "executor.trial.run:run_trial"
"""The function that a rank runs. Tests pass their own."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A rank process has ended."""

    exit_code: int | None = None
    """Negative: the signal that ended it; None: it is out of reach (its worker or node is gone)."""
    output: str = ""
    """The last lines that it printed since its last message."""
    out_of_memory_kill: bool = False
    """Whether the kernel killed a process of the rank's control group for lack of memory while the rank was running."""


class RankTransport(ABC):
    """N rank processes. Used from one thread. Ranks are numbered from 0.

    `receive` returns only messages of the processes of the last `start`: each rank's messages in order, and its death last and
    once.

    Raises:
        RunnerError: the processes cannot be started or placed at all.
    """

    world_size: int
    address: str
    """Where the other ranks reach rank 0."""
    reused: bool = False
    """Whether the last `start` reused running processes."""

    @abstractmethod
    def start(self, python_path: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES) -> None:
        """Start every rank with these additional environment variables; returns before the ranks are ready."""

    @abstractmethod
    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank; ignored if the rank is dead."""

    @abstractmethod
    def receive(self, timeout: float) -> list[tuple[int, Message | Death]]:
        """Return the new messages, waiting up to `timeout` seconds for the first."""

    def node_of(self, rank: int) -> str | None:
        """Return the name of the rank's node, as in `TrialRequest.excluded_nodes`; None: its host's name."""
        del rank
        return None

    def renumber(self, order: Sequence[int]) -> None:
        """From now on rank i is the process that is rank `order[i]` now; only ranks of one host trade numbers."""
        raise NotImplementedError

    def stacks(self, seconds: float) -> Mapping[int, str]:
        """Return each rank's thread stacks, waiting up to `seconds`, without ranks that do not print them in time."""
        del seconds
        return {}

    @abstractmethod
    def kill(self) -> None:
        """End every rank process and all processes that it has started, and wait for their end. `start` may follow."""

    @abstractmethod
    def close(self) -> None:
        """Like `kill`, and release all resources. May be called twice."""


def thread_environment(cores: int, ranks_on_host: int) -> Mapping[str, str]:
    """Divide the cores among the ranks of a host: more threads than cores would only take turns."""
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks_on_host))}


LOOPBACK: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo"}
"""For gangs on one host: otherwise gloo resolves the host's name, which not every network can do."""
