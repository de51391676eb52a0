"""A rank process as its parent sees it: a message pipe, its output, its end, and the environment that it gets.

This file imports only the standard library and files that do the same: Ray actors carry it by value to workers where our
packages are not importable.

A trial runs the code of whoever submitted it. The environment of the worker that starts it contains the database address with
its password, API keys, and cloud tokens.

This file imports only the standard library: Ray actors carry it by value to workers where our packages are not importable.
"""

import contextlib
import json
import multiprocessing
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

from executor.engines.leftovers import note_processes, release_processes, remove_files_of, sweep_ledgers
from executor.process_tree import MARK, kill_all, kill_strays, out_of_memory_kills, own_mark
from executor.runners.rank_output import RankOutput

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
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH|JWT", re.IGNORECASE)
"""A name that contains one of these words is not passed for its prefix, only if it is listed by name."""


def is_listed(name: str) -> bool:
    """Whether trials inherit a variable of this name."""
    return name in NAMES or (name.startswith(PREFIXES) and not _SECRET.search(name))


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


_KEPT = ("AUTOTUNE_PASS_ENVIRONMENT", "RAY_", "PG")
"""Prefixes that stay visible besides: settings of Ray, and of database connections that may be opened meanwhile."""


@contextlib.contextmanager
def hidden_from_children() -> Iterator[None]:
    """Hide all other variables from processes started inside the block, for a library that passes on the whole environment."""
    shown = for_trials(os.environ)
    hidden = {name: value for name, value in os.environ.items() if name not in shown and not name.startswith(_KEPT)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
