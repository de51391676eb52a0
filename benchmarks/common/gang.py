"""Warm rank processes on this machine that run one task after another; a task that fails or hangs costs only itself."""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

START_SECONDS = 120.0
"""Added to the limit of a task that finds the ranks still starting: on a busy machine importing torch takes long."""
PRELOADED = ("torch", "torch.distributed.fsdp", "torch.distributed.pipelining")
GRACE_SECONDS = 1.0
"""How long other ranks may still answer after one has failed: the first error is the most informative one."""


class TaskError(RuntimeError):
    """A task raised on a rank, or a rank died or gave no answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A rank's answer to a task."""

    result: Any = None
    error: str | None = None
    """The traceback; None: none."""


class Gang:
    """Ranks of one gloo group, started by the first `run` and restarted by the `run` after a failure. Use as a context."""

    def __init__(self, ranks: int, work: Callable[[int, Any], Any], seconds_limit: float = 120.0) -> None:
        """`work(rank, task)` runs in every rank, which imports it by name."""
        self.ranks, self.work, self.seconds_limit = ranks, work, seconds_limit
        self.starts = 0
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> "Gang":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, task: Any) -> list[Any]:
        """Every rank's result, by rank.

        Raises:
            TaskError: the message ends in the last line of the first failing rank's traceback.
        """
        limit = self.seconds_limit
        if not self._processes:
            self._start()
            limit += START_SECONDS
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # a rank that died; its connection says so when it is read
                connection.send(task)
        try:
            return [answer.result for answer in self._answers(limit)]
        except BaseException:
            self._stop()
            raise

    def _answers(self, limit: float) -> list[_Answer]:
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + limit
        while len(answers) < self.ranks:
            waiting = {connection: rank for rank, connection in enumerate(self._connections) if rank not in answers}
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            for connection in ready:
                answers[waiting[connection]] = self._receive(connection, waiting[connection])
            failed = [rank for rank, answer in answers.items() if answer.error]
            if failed and (not ready or time.monotonic() > deadline):
                break
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            elif not ready:
                self._dump_stacks()
                raise TaskError(f"ranks {sorted(waiting.values())} gave no answer in {limit:.0f} s")
        for rank, answer in answers.items():
            if answer.error:
                raise TaskError(f"rank {rank}: {answer.error}")
        return [answers[rank] for rank in range(self.ranks)]

    def _dump_stacks(self) -> None:
        """Make the ranks write their stacks to stderr."""
        for process in self._processes:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(GRACE_SECONDS)

    @staticmethod
    def _receive(connection: Connection, rank: int) -> _Answer:
        try:
            answer: _Answer = connection.recv()
        except (EOFError, ConnectionResetError):
            return _Answer(error=f"the process of rank {rank} died")
        return answer

    def _start(self) -> None:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ["OMP_NUM_THREADS"] = "1"
        self.starts += 1
        # Here and not in rank 0, so that no other process can take the chosen port meanwhile.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Ranks are forked from a process that has only imported torch: a start costs no imports.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, self.work.__module__])
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.ranks, self._store.port, theirs, self.work), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _stop(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        self._store = None


def _serve(rank: int, ranks: int, port: int, connection: Connection, work: Callable[[int, Any], Any]) -> None:
    """Run tasks on a rank until the pipe closes."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    # torch's warnings on a CPU do not concern results, and a failing pipeline logs its whole schedule.
    warnings.simplefilter("ignore")
    logging.disable()
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            try:
                answer = _Answer(result=work(rank, task))
            except Exception:
                answer = _Answer(error=traceback.format_exc().strip())
            connection.send(answer)
