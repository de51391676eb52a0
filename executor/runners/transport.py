"""How a gang reaches its rank processes, wherever they run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from executor.runners.messages import Message

RANK_MAIN = str(Path(__file__).with_name("rank_main.py"))
RUN_TRIAL = "executor.trial.run:run_trial"
"""What a rank runs. Tests give their own."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A rank process has ended."""

    exit_code: int | None = None
    """Negative: the signal that ended it; None: it is out of reach (its worker or node is gone)."""
    output: str = ""
    """The last lines that it printed since it was asked for its last trial."""
    out_of_memory_kill: bool = False
    """Whether the kernel killed a process of the rank's control group for want of memory while the rank lived."""


class Transport(ABC):
    """N rank processes. Used from one thread. Ranks are numbered from 0.

    What `receive` gives is of the processes that the last `start` began, each rank's messages in order, and its death
    last, once.

    Raises:
        RunnerError: the processes cannot be started or placed at all.
    """

    world_size: int
    address: str
    """Where rank 0 is reached by the others."""
    reused: bool = False
    """Whether the last `start` found processes that were up already."""

    @abstractmethod
    def start(self, python_path: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES) -> None:
        """Start every rank, with these variables in its environment beside its own; returns before they are ready."""

    @abstractmethod
    def send(self, rank: int, message: Message) -> None:
        """Send to a rank. To one that is dead: ignored."""

    @abstractmethod
    def receive(self, timeout: float) -> list[tuple[int, Message | Death]]:
        """What came, waiting up to `timeout` seconds for the first."""

    def node_of(self, rank: int) -> str | None:
        """The name under which `TrialRequest.excluded_nodes` knows the rank's node; None: its host's name."""
        del rank
        return None

    def stacks(self, seconds: float) -> Mapping[int, str]:
        """Where the threads of each rank stand, waiting up to `seconds` for them to print it; without those that do not."""
        del seconds
        return {}

    @abstractmethod
    def kill(self) -> None:
        """End every rank process and what it has started; none is left on return. `start` may follow."""

    @abstractmethod
    def close(self) -> None:
        """`kill`, and give back everything. May be called twice."""


def thread_environment(cores: int, ranks_on_host: int) -> Mapping[str, str]:
    """Cores are shared out among the ranks of a host: threads in excess only take turns."""
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks_on_host))}


LOOPBACK: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo"}
"""For gangs on one host: without it gloo looks up the host's name, which not every network answers."""
