"""The local runner, which needs only torch: plain processes on this machine."""

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from executor.errors import RunnerError
from executor.runners.gang import Gang
from executor.runners.gang_runner import GangRunner
from executor.runners.rank_process import RankProcess, end_all, stacks_of
from executor.runners.transport import (
    LOOPBACK,
    NO_VARIABLES,
    RANK_MAIN,
    RUN_TRIAL,
    Death,
    Message,
    RankTransport,
    decode,
    encode,
    thread_environment,
)


class LocalRunner(GangRunner):
    """Runs trials on `world_size` processes of this machine, one trial at a time.

    `python_path` is put first on the ranks' `sys.path`, after a `FactoryModel`'s own. `log_directory` gets a bounded log of
    each rank. `device` is `auto` (accelerators if available), `cpu` or `cuda`. `environment` is added to the ranks'.
    """

    def __init__(
        self,
        world_size: int,
        *,
        python_path: Sequence[str] = (),
        log_directory: str | os.PathLike[str] | None = None,
        device: str = "auto",
        environment: Mapping[str, str] | None = None,
        trial_function: str = RUN_TRIAL,
    ) -> None:
        transport = LocalTransport(
            world_size, log_directory=log_directory, environment=environment or {}, trial_function=trial_function
        )
        super().__init__(world_size, Gang(transport, python_path=python_path, device=device))


class LocalTransport(RankTransport):
    """Rank processes that are children of this one."""

    address = "127.0.0.1"

    def __init__(
        self,
        world_size: int,
        *,
        log_directory: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str],
        trial_function: str = RUN_TRIAL,
    ) -> None:
        self.world_size = world_size
        self._log_directory = Path(log_directory) if log_directory is not None else None
        cores = len(os.sched_getaffinity(0))
        self._environment = {**LOOPBACK, **thread_environment(cores, world_size), **environment}
        self._trial_function = trial_function
        self._ranks: dict[int, RankProcess] = {}

    def start(self, python_path: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES) -> None:
        """Start every rank; see `RankTransport`.

        Raises:
            ModuleNotFoundError: torch is not installed.
        """
        if importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        try:
            for rank in range(self.world_size):
                self._ranks[rank] = self._start_rank(rank, python_path, variables)
        except OSError as error:
            self.kill()
            raise RunnerError(f"rank processes cannot be started: {error}; check the limits of this machine") from error

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank; see `RankTransport`."""
        if rank in self._ranks:
            self._ranks[rank].send(encode(message))

    def receive(self, timeout: float) -> list[tuple[int, Message | Death]]:
        """Return the new messages; see `RankTransport`."""
        until = time.monotonic() + timeout
        while True:
            received = [report for rank in list(self._ranks) for report in self._receive_from(rank)]
            remaining = until - time.monotonic()
            if received or remaining <= 0:
                return received
            if self._ranks:
                # Longest delay until the end of a rank is noticed if a child of the rank keeps the pipe open.
                wait([process.connection for process in self._ranks.values()], min(remaining, 0.1))
                time.sleep(0.001)  # a closed pipe is always readable: never spin while its process ends
            else:
                time.sleep(remaining)

    def stacks(self, seconds: float) -> Mapping[int, str]:
        """Return the ranks' stacks; see `RankTransport`."""
        return stacks_of(self._ranks, seconds)

    def kill(self) -> None:
        """End every rank; see `RankTransport`."""
        end_all(self._ranks.values())
        while self._ranks:
            self._ranks.popitem()[1].kill()

    def close(self) -> None:
        """End every rank; see `RankTransport`."""
        self.kill()

    def _start_rank(self, rank: int, python_path: Sequence[str], variables: Mapping[str, str]) -> RankProcess:
        log_path = None
        if self._log_directory is not None:
            self._log_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            log_path = str(self._log_directory / f"rank-{rank}.log")
        return RankProcess(
            RANK_MAIN,
            trial_function=self._trial_function,
            python_path=python_path,
            environment={**self._environment, **variables},
            log_path=log_path,
        )

    def _receive_from(self, rank: int) -> list[tuple[int, Message | Death]]:
        process = self._ranks[rank]
        exit_code = process.exit_code()  # read before the messages, so that a death is reported after the last of them
        received: list[tuple[int, Message | Death]] = [(rank, decode(message)) for message in process.receive()]
        if exit_code is not None:
            oom = process.out_of_memory_kill()
            received.append((rank, Death(exit_code=exit_code, output=process.tail(), out_of_memory_kill=oom)))
            self._ranks.pop(rank).kill()
        return received
