"""Rank processes for tests of what ranks do: forked from one process that has imported torch, where else each would import it.

That takes a rank longer than most of these tests. All else is as in life: its pipe, output, environment, folder and process
group, `rank_main` from its first line on, and its parent, which is this process:

1. The server forks a child that forks the rank and ends at once.
2. An orphan goes to its nearest ancestor that takes orphans. During a start this process is one (PR_SET_CHILD_SUBREAPER).
3. The rank waits until it is this process's child, and begins.

How ranks start in earnest is for the tests that do not ask for this: the contracts of the local runner and of Ray, and every
command that is run as a process. There ranks also differ in the seed of their hashes, which those of one server share.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PRELOADED = (
    "numpy", "torch", "torch._dynamo", "torch._subclasses.fake_tensor", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor", "torch.nn.attention.bias", "torch.nn.parallel",
    "torch.profiler", "torch.testing._internal.distributed.fake_pg", "torch.utils.checkpoint", "torch.utils.flop_counter",
)  # fmt: skip
"""What ranks import that is not ours. Of ours nothing: ranks must find and forget it themselves."""
_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 1 << 17
"""Of an order: its environment is the longest part."""


class ForkServer:
    """Starts ranks. Used from one thread at a time."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No threads of a library, which no fork would take along; each rank sets how many it has.
        few = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with theirs:
            command = [sys.executable, "-P", "-u", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=kept | few, pass_fds=(theirs.fileno(),))

    def start(self, rank_main: str, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]) -> int:
        """Start a rank; return its id. `files`: its end of the pipe, and where its output goes."""
        order = {
            "parent": os.getpid(), "rank_main": rank_main, "arguments": [*arguments], "environment": {**environment},
            "folder": str(Path.cwd()),
        }  # fmt: skip
        with _taking_orphans():
            socket.send_fds(self._channel, [json.dumps(order).encode()], files)
            answer = self._channel.recv(_MOST_BYTES)
        if not answer:
            raise OSError("the process that forks ranks has ended")
        return int(answer)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(20)

    def as_subprocess(self) -> SimpleNamespace:
        """What `executor.runners.rank_process` uses of the module `subprocess`."""

        class Popen(ForkedRank):
            server = self

        return SimpleNamespace(Popen=Popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)


class ForkedRank:
    """What `executor.runners.rank_process` uses of `subprocess.Popen`."""

    server: ForkServer

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: tuple[int], **_: Any) -> None:
        _python, _flag, _unbuffered, rank_main, _descriptor, *arguments = command
        output, theirs = os.pipe()
        try:
            self.pid = self.server.start(rank_main, arguments, env, (*pass_fds, theirs))
        finally:
            os.close(theirs)
        self.stdout = os.fdopen(output, "rb")
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if ended else None
            return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.001)
        return code


@contextlib.contextmanager
def _taking_orphans() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "orphans are not given to this process")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def serve(channel: socket.socket) -> None:
    """Fork a rank for every order, until there is nobody who could give one."""
    for name in PRELOADED:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads, of which a fork would take one along"
    gc.collect()
    gc.freeze()
    while True:
        text, files, _, _ = socket.recv_fds(channel, _MOST_BYTES, 2)
        if not text:
            return
        channel.send(str(_fork_orphan(channel, json.loads(text), files)).encode())
        for descriptor in files:
            os.close(descriptor)


def _fork_orphan(channel: socket.socket, order: dict[str, Any], files: Sequence[int]) -> int:
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        rank = os.fork()
        if rank == 0:
            os.close(read)
            os.close(write)
            channel.close()
            _become(order, *files)
        os.setpgid(rank, rank)  # before anybody knows of it who may kill the group
        os.write(write, str(rank).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(between, 0)
    rank = int(os.read(read, 32))
    os.close(read)
    return rank


def _become(order: dict[str, Any], connection: int, output: int) -> None:
    """Be the rank that was ordered, to its end."""
    until = time.monotonic() + 60.0
    while os.getppid() != order["parent"]:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.001)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    Path("/proc/self/comm").write_text("rank_main", encoding="utf-8")  # it has the command line of the server
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv[:] = [order["rank_main"], str(connection), *order["arguments"]]
    runpy.run_path(order["rank_main"], run_name="__main__")
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
