"""A rank process as its parent sees it: a message pipe, its output, its end, and the environment that it gets.

A trial runs the code of whoever submitted it. The environment of the worker that starts it contains the database address with
its password, API keys, and cloud tokens.

This file imports only the standard library and files that do the same: Ray actors carry it by value to workers where our
packages are not importable.
"""

import codecs
import collections
import contextlib
import json
import multiprocessing
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from executor.process_tree import (
    MARK,
    kill_all,
    kill_strays,
    note_processes,
    out_of_memory_kills,
    own_mark,
    release_processes,
    remove_files_of,
    sweep_ledgers,
)


class RankOutput:
    """Reads a rank's output, so that the rank never blocks on it; keeps its end, and forwards all of it in pieces."""

    _READS = 32
    """Most reads at once: a rank may print faster than the parent reads."""

    _TAIL_BYTES = 16_384
    """Bytes of the end of a rank's output that are kept in memory."""

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: str | None) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._log_path = log_path
        self._log: BinaryIO | None = None
        self._kept = b""
        self._forgotten = 0
        self.length = 0
        """Total bytes printed so far."""
        # Bytes of the beginning and of the end that are forwarded of the output between two readings.
        self._pending: HeadAndTail[bytes] = HeadAndTail(65_536, 262_144)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._passed_at = 0.0
        self._lock = threading.Lock()
        """Protects the stream: a caller must see all earlier output, even what the thread has just read."""
        self._at_end = False
        os.set_blocking(self._stream.fileno(), False)
        self._thread = threading.Thread(target=self._follow, name="rank-output", daemon=True)
        self._thread.start()

    def tail(self, *, wait: bool) -> str:
        """Return the kept output. With `wait`, read the rest first: the process has ended, so all output is available."""
        if wait:
            with self._lock:  # the thread may lag behind on a busy machine
                self._read(self._READS)
        return self.since(self._forgotten)

    def since(self, length: int) -> str:
        """Return the output after the first `length` bytes, as far as it is kept."""
        with self._lock:
            printed = min(self.length - length, self._TAIL_BYTES)
            return self._kept[-printed:].decode(errors="replace").strip() if printed > 0 else ""

    def forget(self) -> None:
        """Discard the output so far."""
        self._forgotten = self.length

    def messages(self, *, at_once: bool, ended: bool) -> list[bytes]:
        """Return the output since the last call, if that was long enough ago or it is requested `at_once`."""
        if ended:
            self._thread.join(0.5)
        # Output that is not followed by a message is forwarded four times a second.
        if not (at_once or ended) and time.monotonic() - self._passed_at < 0.25:
            return []
        self._passed_at = time.monotonic()
        with self._lock:
            self._read(self._READS)
            pieces = self._pending.take()
        messages = [self._message(left_out, chunk) for left_out, chunk in pieces]
        return [json.dumps(message).encode() for message in messages if message["text"] or message["left_out"]]

    def close(self) -> None:
        """Stop reading; the process has ended."""
        self._thread.join(0.5)

    def _message(self, left_out: int, chunk: bytes) -> dict[str, object]:
        if left_out:
            self._decoder.reset()  # the other bytes of a split character may be in the dropped part
        return {"kind": "output", "text": self._decoder.decode(chunk), "left_out": left_out}

    def _follow(self) -> None:
        with self._stream as stream:
            poller = select.poll()
            poller.register(stream, select.POLLIN | select.POLLHUP)
            while not self._at_end:
                poller.poll()
                with self._lock:
                    self._read(1)
        if self._log is not None:
            self._log.close()

    def _read(self, most: int) -> None:
        """Read the available output, in at most `most` reads."""
        for _ in range(most):
            if self._at_end:
                return
            try:
                chunk = os.read(self._stream.fileno(), 65_536)
            except BlockingIOError:
                return
            self._at_end = not chunk
            if chunk:
                self._keep(chunk)

    def _keep(self, chunk: bytes) -> None:
        self._pending.add(chunk, len(chunk))
        self._kept = (self._kept + chunk)[-self._TAIL_BYTES :]
        self.length += len(chunk)
        if self._log_path is not None:
            self._log = _roll(self._log_path, self._log)
            self._log.write(chunk)


def _roll(path: str, log: BinaryIO | None) -> BinaryIO:
    """Return the open log file, after rotating one that is full (4 MiB); one old file is kept."""
    if log is not None and log.tell() < 4 * 2**20:
        return log
    if log is not None:
        log.close()
        Path(path).replace(f"{path}.1")
    # Readable only by its owner: scripts may print secrets.
    return open(path, "ab", buffering=0, opener=partial(os.open, mode=0o600))


T = TypeVar("T")


class HeadAndTail(Generic[T]):
    """A queue of pieces of a stream. If they arrive faster than they are taken, the middle is dropped and its size counted."""

    def __init__(self, head: int, tail: int) -> None:
        """
        Args:
            head: size up to which the first pieces are kept.
            tail: size of the latest further pieces that are kept.
        """
        self._head_size, self._tail_size = head, tail
        self._empty()

    def add(self, item: T, size: int) -> None:
        """Append a piece."""
        if self._kept < self._head_size:
            self._head.append((0, item))
            self._kept += size
            return
        self._tail.append((size, item))
        self._length += size
        while self._length > self._tail_size and len(self._tail) > 1:
            dropped, _ = self._tail.popleft()
            self._length -= dropped
            self._left_out += dropped

    def take(self) -> list[tuple[int, T]]:
        """Remove and return the pieces in order, each with the size of what was dropped just before it."""
        tail = [(0, item) for _, item in self._tail]
        if tail:
            tail[0] = (self._left_out, tail[0][1])
        pieces = [*self._head, *tail]
        self._empty()
        return pieces

    def _empty(self) -> None:
        self._head: list[tuple[int, T]] = []
        self._tail: collections.deque[tuple[int, T]] = collections.deque()
        self._kept = self._length = self._left_out = 0


STACK_TAIL_SECONDS = 0.05
"""Time from the first to the last line of a rank's stacks: the fault handler prints them inside its signal handler."""
_swept: list[bool] = []
"""Contains True once this process has swept its host. A list, because a cached function cannot be pickled by value."""


class RankProcess:
    """One rank process. Used from one thread, except `send` and `end`, which may be called from another.

    The system kills it when its parent ends. It has its own process group, but not its own session, so that Ctrl-C in a
    terminal does not reach it. `process_tree` describes how all processes that it has started are found.
    """

    def __init__(
        self,
        rank_main: str,
        *,
        trial_function: str,
        python_path: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log_path: str | None = None,
    ) -> None:
        _sweep()
        ours, theirs = multiprocessing.Pipe(duplex=True)
        self._mark = own_mark(secrets.randbelow(10**9))
        self._kills = out_of_memory_kills()
        self._ended = False
        arguments = [str(theirs.fileno()), str(os.getpid()), trial_function, json.dumps(list(python_path))]
        # -P: the folder of rank_main, which contains our `ray` package, must not be first on sys.path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", rank_main, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**for_trials(os.environ), **(environment or {}), MARK: self._mark},
            pass_fds=(theirs.fileno(),),
            process_group=0,
        )
        theirs.close()
        note_processes([self._process.pid])
        self.connection: Connection = ours
        """Readable if there is a message or the rank has ended."""
        self._output = RankOutput(self._process, log_path)

    def send(self, message: bytes) -> None:
        """Send a message; `receive` reports a rank that has ended. The output so far is discarded."""
        self._output.forget()
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def receive(self) -> list[bytes]:
        """Return the available messages without waiting, preceded by earlier output as messages of kind `output`."""
        messages: list[bytes] = []
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll(0):
                messages.append(self.connection.recv_bytes())
        return [*self._output.messages(at_once=bool(messages), ended=self._process.poll() is not None), *messages]

    def wait(self, timeout: float) -> None:
        """Wait until there is a message, the rank has ended, or `timeout` seconds have passed."""
        with contextlib.suppress(OSError):
            self.connection.poll(timeout)

    def exit_code(self) -> int | None:
        """Return the exit code; None: running; negative: the signal that ended it."""
        code = self._process.poll()
        if code is not None:
            end_all([self])  # processes that users' code has started must not outlive the rank
        return code

    def out_of_memory_kill(self) -> bool:
        """Whether the kernel has killed a process of this control group for lack of memory since the rank was started."""
        return out_of_memory_kills() > self._kills

    def tail(self) -> str:
        """Return the last lines of the output; complete once the rank has ended."""
        return self._output.tail(wait=self._process.poll() is not None)

    def end(self) -> None:
        """End the rank and all processes that it has started, and wait. Its last messages and output stay readable."""
        end_all([self])

    def kill(self) -> None:
        """End the rank and close its pipe and output. May be called twice."""
        self.end()
        self._output.close()
        self.connection.close()


def stacks_of(ranks: Mapping[int, RankProcess], seconds: float) -> dict[int, str]:
    """Make all ranks print their threads' stacks at once. Return what each printed in time, without ranks that did not."""
    before = {rank: process._output.length for rank, process in ranks.items()}
    for process in ranks.values():
        if process._process.poll() is None:
            os.kill(process._process.pid, signal.SIGUSR2)
    until = time.monotonic() + seconds
    while any(ranks[rank]._output.length == length for rank, length in before.items()) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(STACK_TAIL_SECONDS)
    printed = {rank: ranks[rank]._output.since(length) for rank, length in before.items()}
    return {rank: text for rank, text in printed.items() if text}


def end_all(ranks: Iterable[RankProcess]) -> None:
    """End ranks and all processes that they have started, in parallel, and return when they are gone."""
    living = [rank for rank in ranks if not rank._ended]
    if not living:
        return
    killed = kill_all({rank._process.pid: rank._mark for rank in living})
    for rank in living:
        rank._process.wait()
        rank._ended = True
    remove_files_of(killed)
    release_processes(rank._process.pid for rank in living)


def _sweep() -> None:
    """Once per process: end processes and remove files that ranks of dead processes have left on this host."""
    if _swept:
        return
    _swept.append(True)
    kill_strays()
    sweep_ledgers()


PASSED_VARIABLE = "AUTOTUNE_PASS_ENVIRONMENT"
"""Further names for trials, separated by spaces; set by the worker's `--pass-environment`."""
NAMES = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR",
    "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS",
    "MAX_JOBS", "GOMP_CPU_AFFINITY", "ROCM_PATH", "ROCM_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
    "ftp_proxy", "all_proxy", "no_proxy", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT",
    "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE", "GROUP_RANK", "NODE_RANK", "AUTOTUNE_PLUGINS",
))  # fmt: skip
"""Variables that trials inherit from their parent."""
PREFIXES = (
    "LC_", "XDG_", "PYTHON", "CUDA_", "CUDNN_", "CUBLAS", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "UCC_", "FI_", "IBV_", "MLX5_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "BLIS_", "MALLOC_", "TORCH", "PYTORCH_", "TRITON_",
    "NVTE_", "NVSHMEM_", "FLASH_ATTENTION_", "DS_", "DEEPSPEED_", "ACCELERATE_", "FSDP_", "HIP_", "HSA_", "ROCR_", "RCCL_",
    "MIOPEN_", "SLURM_",
)  # fmt: skip
"""Prefixes of further inherited names: settings of libraries that trials use."""


def is_listed(name: str) -> bool:
    """Whether trials inherit a variable of this name."""
    # A name that contains one of these words is not passed for its prefix, only if it is listed by name.
    secret = r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH|JWT"
    return name in NAMES or (name.startswith(PREFIXES) and not re.search(secret, name, re.IGNORECASE))


def passed_names(environment: Mapping[str, str]) -> list[str]:
    """Return the further names that the operator of the worker passes to trials."""
    return environment.get(PASSED_VARIABLE, "").split()


def passed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return these variables with their values, for processes that are not children of this one."""
    return {name: environment[name] for name in passed_names(environment) if name in environment}


def for_trials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that trials inherit."""
    listed = {name: value for name, value in environment.items() if is_listed(name)}
    return listed | passed_variables(environment)


@contextlib.contextmanager
def hidden_from_children() -> Iterator[None]:
    """Hide all other variables from processes started inside the block, for a library that passes on the whole environment."""
    shown = for_trials(os.environ)
    # Besides, settings of Ray, and of database connections that may be opened meanwhile, stay visible.
    prefixes = ("AUTOTUNE_PASS_ENVIRONMENT", "RAY_", "PG")
    hidden = {name: value for name, value in os.environ.items() if name not in shown and not name.startswith(prefixes)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
