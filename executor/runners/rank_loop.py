"""The main loop of a rank process: answers the parent's messages one after the other.

No function here may import our packages: when it runs, they are no longer importable (see `rank_main`).
"""

import ctypes
import gc
import os
import queue
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from executor.detect import local_gpus
from executor.dry.module_profile import profile_module, with_profile
from executor.engine import RankContext
from executor.failures import failure_table
from executor.measurement.device import DeviceCounters, counters_of
from executor.measurement.microbenchmark import run_microbenchmark
from executor.runners.failures import Failure, classify
from executor.runners.messages import Message, MessageKind, decode, encode
from executor.runners.process_group import abort, join
from executor.runners.verdict import CLEAN
from executor.runners.watchdog import RankHeartbeat
from executor.runners.wear import process_usage
from executor.user_module.description import describe
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.failure import Sign
from search_spaces.models.model import FactoryModel
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Progress, TrialRequest, TrialResult, Workload

RunTrial = Callable[[RankContext, TrialRequest, Callable[[Progress], None]], TrialResult]


class RankLoop:
    """Serves one parent until it closes the pipe. A thread receives the messages, because `abort` arrives during a collective.

    After a failure, these steps follow in this order, because each may wait for other ranks, or forever:

    1. The failure is reported. The parent asks the other ranks to `abort`, and they fail too.
    2. Process groups are aborted, and the trial's deferred clean-up runs (`RankContext.after_failure`).
    3. Memory is released, and what is still held is reported (`rested`). The parent decides whether this process continues.
    """

    def __init__(self, connection: Connection, run_trial: RunTrial) -> None:
        self._connection = connection
        self._run_trial = run_trial
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._context: RankContext | None = None
        self._counters = DeviceCounters(torch.device("cpu"))
        self._attempt = self._aborted = ""
        self._aborting = threading.Lock()
        # Of glibc; other C libraries do not have it.
        self._malloc_trim: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._frozen = False
        self._lock = threading.Lock()
        self._heartbeat = RankHeartbeat(self._send)
        self._memory = DeviceMemory()
        self._table = failure_table()

    def serve(self) -> None:
        """Send `ready`, then answer messages until the parent closes the pipe."""
        self._send(_ready())
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        while (message := self._inbox.get()) is not None:
            failed = self._answer(message)
            if message["kind"] in (MessageKind.RUN, MessageKind.MEASURE):
                if failed:
                    self._memory.failed()
                    self._clean_up()
                self._release_memory(failed)
                if (usage := process_usage(self._counters.reserved_bytes(), self._counters.pinned_bytes(), failed)) is not None:
                    self._send({"kind": MessageKind.RESTED, "rest": to_plain(usage)})

    def _listen(self) -> None:
        while True:
            try:
                message = decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._inbox.put(None)
                return
            if message["kind"] == MessageKind.ABORT:
                self._abort(message["attempt"])
            else:
                self._inbox.put(message)

    def _abort(self, attempt: str) -> None:
        """Abort what the trial waits for; if the trial has not started yet, prevent its start."""
        with self._aborting:
            self._aborted = attempt
            if self._attempt == attempt:
                abort()

    def _answer(self, message: Message) -> bool:
        """Handle a message and send the answer. Return whether that failed."""
        failed = False
        try:
            answer = encode(self._do(message))
        except BaseException as error:  # a user's sys.exit() must not end the rank silently
            answer, failed = encode({"kind": MessageKind.FAILURE, **to_plain(self._classify(error))}), True
        finally:
            self._heartbeat.end()
        # Not inside the `try`, where the error would keep alive all objects of its frames.
        self._send_bytes(answer)
        return failed

    def _classify(self, error: BaseException) -> Failure:
        """Classify an error. On a rank that was asked to abort it is a consequence of that."""
        failure = classify(error, self._table, self._memory.signs)
        is_consequence = self._attempt == self._aborted and failure.outcome not in CLEAN and not failure.retire
        return replace(failure, collective=True) if is_consequence else failure

    def _clean_up(self) -> None:
        """Leave the groups of a failed trial and run its deferred clean-up. The gang must join again."""
        context, self._context = self._context, None
        with self._aborting:
            abort()
        if context is not None:
            context.after_failure.close()

    def _do(self, message: Message) -> Message:
        match message["kind"]:
            case MessageKind.JOIN:
                return self._join(message)
            case MessageKind.RUN:
                request = from_plain(TrialRequest, message["request"])
                self._table = failure_table(request.failures)
                return _result_message(self._run_trial(self._begin(request.attempt), request, self._heartbeat.report))
            case MessageKind.MEASURE:
                benchmark = from_plain(MicrobenchmarkRequest, message["request"])
                self._table = failure_table()
                return _result_message(run_microbenchmark(self._begin(benchmark.attempt), benchmark, self._heartbeat.report))
            case _:
                return {"kind": MessageKind.DESCRIBED, "model": to_plain(_described(message))}

    def _join(self, message: Message) -> Message:
        self._context, self._aborted = None, ""  # an earlier abort was for a previous gang
        self._context = join(message, lambda port: self._send({"kind": MessageKind.LISTENING, "port": port}))
        self._counters = counters_of(self._context.device)
        return {"kind": MessageKind.JOINED}

    def _begin(self, attempt: str) -> RankContext:
        if self._context is None:
            raise ConnectionError("this rank has not joined its gang")
        with self._aborting:
            self._attempt = attempt
            if self._aborted == attempt:
                raise ConnectionAbortedError("another rank failed before this one began")
        self._memory.begin(self._counters)
        self._heartbeat.begin(attempt, reports=self._context.rank == 0)
        return self._context

    def _send(self, message: Message) -> None:
        self._send_bytes(encode(message))

    def _send_bytes(self, message: bytes) -> None:
        with self._lock:  # the heartbeat has its own thread
            self._connection.send_bytes(message)

    def _release_memory(self, failed: bool) -> None:
        """Release what the trial left, so that the next one starts from the same base."""
        gc.collect()
        if not self._frozen and not failed:
            # Objects of the imports, including the first trial's late ones, are permanent: collections need not scan them.
            gc.freeze()
            self._frozen = True
        self._counters.release()
        if self._malloc_trim is not None:
            self._malloc_trim(0)


def _result_message(result: TrialResult) -> Message:
    return {"kind": MessageKind.RESULT, "result": to_plain(result)}


def _described(message: Message) -> FactoryModel:
    """A user's module with its profile: built with memory, or (`without_data`) never."""
    reference, workload = message["reference"], from_plain(Workload, message["workload"])
    if message["without_data"]:
        return profile_module(reference, workload, message["precisions"])
    return with_profile(describe(reference, workload), workload, message["precisions"])


def _ready() -> Message:
    device = torch.accelerator.current_accelerator(check_available=True)
    gpus = local_gpus() if device is None else None  # torch may not be able to use them
    return {
        "kind": MessageKind.READY,
        "host": socket.gethostname(),
        "accelerator": None if device is None else device.type,
        "device_count": torch.accelerator.device_count(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "torch": torch.__version__,
        "torch_build": "cuda" if torch.version.cuda or torch.version.hip else "xpu" if torch.version.xpu else "cpu",
        "driver_devices": 0 if gpus is None else gpus.count,
    }


class DeviceMemory:
    """Tracks one rank process from trial to trial. Without device counters it does nothing: host memory is shared."""

    def __init__(self) -> None:
        self._base: int | None = None
        self._settles = False
        """Whether the base is read again: the first trial has ended well, and left what libraries load once."""
        self._held = 0
        self._counters: DeviceCounters | None = None

    def begin(self, counters: DeviceCounters) -> None:
        """Start a trial. Memory in use beyond that at the start of the second was left by the trials in between; the first one
        also leaves kernels and workspaces of libraries, about 1 GB on an H200. If it failed, its own start is the base."""
        if (memory := counters.memory_in_use()) is None:
            return
        used, _ = memory
        if self._base is None or self._settles:
            self._base, self._settles = used, self._base is None
        self._counters, self._held = counters, max(used - self._base, 0)

    def failed(self) -> None:
        """The trial failed: what it has left is not the base."""
        self._settles = False

    def signs(self, message: str) -> tuple[Sign, ...]:
        """Return LEFTOVER if an allocation lacked no more memory than earlier trials have left."""
        wanted = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)  # by torch's allocator
        if not self._held or wanted is None:
            return ()
        unit = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[wanted[2]]
        missed = max(int(float(wanted[1]) * unit) - self._free(), 0)
        return (Sign.LEFTOVER,) if self._held >= missed else ()

    def _free(self) -> int:
        # After a sticky error the device no longer answers, and the message is not the allocator's.
        memory = None if self._counters is None else self._counters.memory_in_use()
        return 0 if memory is None else memory[1]
