"""What a rank process does all its life: answer the parent's messages, one after the other.

No function here may import anything of ours: when they run, our packages are no longer importable (see `rank_main`).
"""

import ctypes
import gc
import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from executor.engine import RankContext
from executor.failures import failure_table
from executor.measurement.microbenchmark import run_microbenchmark
from executor.runners.device_memory import DeviceMemory
from executor.runners.failures import Failure, classify
from executor.runners.messages import Kind, Message, decode, encode
from executor.runners.process_group import join
from executor.runners.pulse import Pulse
from executor.runners.wear import rest
from executor.user_module.description import describe
from search_spaces.microbenchmark import MicrobenchmarkRequest
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Progress, TrialRequest, TrialResult, Workload

RunTrial = Callable[[RankContext, TrialRequest, Callable[[Progress], None]], TrialResult]


class RankLoop:
    """Serves one parent until it closes the pipe."""

    def __init__(self, connection: Connection, run_trial: RunTrial) -> None:
        self._connection = connection
        self._run_trial = run_trial
        self._context: RankContext | None = None
        self._malloc_trim = _find_malloc_trim()
        self._frozen = False
        self._lock = threading.Lock()
        self._pulse = Pulse(self._send)
        self._memory = DeviceMemory()
        self._table = failure_table()

    def serve(self) -> None:
        """Say `ready`, then answer until the parent is gone."""
        self._send(_ready())
        while True:
            try:
                message = decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            self._send_bytes(self._answer(message))
            if message["kind"] in (Kind.RUN, Kind.MEASURE):
                self._release_memory()
                if (held := rest()) is not None:
                    self._send({"kind": Kind.RESTED, "rest": to_plain(held)})

    def _answer(self, message: Message) -> bytes:
        try:
            return encode(self._do(message))
        except BaseException as error:  # a user's sys.exit() must not end the rank silently
            return encode(_failed(classify(error, self._table, self._memory.signs)))
        finally:
            self._pulse.end()

    def _do(self, message: Message) -> Message:
        match message["kind"]:
            case Kind.JOIN:
                return self._join(message)
            case Kind.RUN:
                request = from_plain(TrialRequest, message["request"])
                self._table = failure_table(request.failures)
                return _answered(self._run_trial(self._begun(request.attempt), request, self._pulse.tell))
            case Kind.MEASURE:
                wanted = from_plain(MicrobenchmarkRequest, message["request"])
                self._table = failure_table()
                return _answered(run_microbenchmark(self._begun(wanted.attempt), wanted, self._pulse.tell))
            case _:
                workload = from_plain(Workload, message["workload"])
                return {"kind": Kind.DESCRIBED, "model": to_plain(describe(message["reference"], workload))}

    def _join(self, message: Message) -> Message:
        self._context = None
        self._context = join(message, lambda port: self._send({"kind": Kind.LISTENING, "port": port}))
        return {"kind": Kind.JOINED}

    def _begun(self, attempt: str) -> RankContext:
        if self._context is None:
            raise ConnectionError("this rank has not joined its gang")
        self._memory.begin(self._context.device)
        self._pulse.begin(attempt, reports=self._context.rank == 0)
        return self._context

    def _send(self, message: Message) -> None:
        self._send_bytes(encode(message))

    def _send_bytes(self, message: bytes) -> None:
        with self._lock:  # the pulse has a thread of its own
            self._connection.send_bytes(message)

    def _release_memory(self) -> None:
        """Give back what the trial left, so that the next one starts from the same base."""
        gc.collect()
        if not self._frozen:
            # What the imports and the first trial's late ones made stays for good: collections need not look at it again.
            gc.freeze()
            self._frozen = True
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        if self._malloc_trim is not None:
            self._malloc_trim(0)


def _answered(result: TrialResult) -> Message:
    return {"kind": Kind.RESULT, "result": to_plain(result)}


def _ready() -> Message:
    return {
        "kind": Kind.READY,
        "host": socket.gethostname(),
        "accelerator": _accelerator(),
        "device_count": torch.accelerator.device_count(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def _failed(failure: Failure) -> Message:
    return {"kind": Kind.FAILURE, **to_plain(failure)}


def _find_malloc_trim() -> Callable[[int], object] | None:
    """glibc's; other C libraries have none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
