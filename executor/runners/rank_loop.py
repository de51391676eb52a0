"""The main loop of a rank process: answers the parent's messages one after the other.

No function here may import our packages: when it runs, they are no longer importable (see `rank_main`).
"""

import contextlib
import ctypes
import gc
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from executor.detect import local_gpus
from executor.dry.module_profile import profile_module, with_profile
from executor.engine import RankContext
from executor.errors import failure_table
from executor.measurement.device import DeviceCounters, counters_of
from executor.measurement.microbenchmark import run_microbenchmark
from executor.parallel.collectives import group_options
from executor.runners.transport import Message, MessageKind, decode, encode
from executor.runners.verdict import CLEAN, classify
from executor.runners.watchdog import RankHeartbeat, process_usage
from executor.user_module.description import describe
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.failure import Sign
from search_spaces.models.model import FactoryModel
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Progress, TrialRequest, TrialResult, Workload


class RankLoop:
    """Serves one parent until it closes the pipe. A thread receives the messages, because `abort` arrives during a collective.

    After a failure, these steps follow in this order, because each may wait for other ranks, or forever:

    1. The failure is reported. The parent asks the other ranks to `abort`, and they fail too.
    2. Process groups are aborted, and the trial's deferred clean-up runs (`RankContext.after_failure`).
    3. Memory is released, and what is still held is reported (`rested`). The parent decides whether this process continues.
    """

    def __init__(
        self, connection: Connection, run_trial: Callable[[RankContext, TrialRequest, Callable[[Progress], None]], TrialResult]
    ) -> None:
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
            failure = classify(error, self._table, self._memory.signs)
            # On a rank that was asked to abort, an error is a consequence of that.
            if self._attempt == self._aborted and failure.outcome not in CLEAN and not failure.retire:
                failure = replace(failure, collective=True)
            answer, failed = encode({"kind": MessageKind.FAILURE, **to_plain(failure)}), True
        finally:
            self._heartbeat.end()
        # Not inside the `try`, where the error would keep alive all objects of its frames.
        self._send_bytes(answer)
        return failed

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
    precisions, device_kind = message["precisions"], message["device_kind"]
    if message["without_data"]:
        return profile_module(reference, workload, precisions, device_kind)
    return with_profile(describe(reference, workload), workload, precisions, device_kind)


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


def join(message: Message, announce: Callable[[int], None]) -> RankContext:
    """Leave the previous group, if any, and join the one that `message` describes.

    Rank 0 lets the system choose the rendezvous port and announces it: a port chosen in advance could be taken by another
    program before rank 0 binds it.
    """
    leave()
    if sharing := message.get("cores_shared_by"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharing))
    rank, world_size, device = message["rank"], message["world_size"], torch.device(message["device"])
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    address = (message["address"], message["port"] or 0)
    store = dist.TCPStore(*address, world_size, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    if rank == 0:
        announce(store.port)
    _set_environment(message, store.port)
    # Without this, NCCL's watchdog ends a process whose collectives `abort` has ended; our own watchdog ends hanging trials.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    dist.init_process_group(
        message["backend"],
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if message["backend"] == "nccl" else None,
        pg_options=group_options(message["backend"]),
    )
    control = dist.new_group(backend="gloo") if world_size > 1 else None
    return RankContext(
        rank=rank,
        world_size=world_size,
        device=device,
        control_group=control,
        reusable_groups={},
        ranks_on_host=message["local_world_size"],
        shares_device=message["shares_device"],
    )


def abort() -> None:
    """Leave every process group immediately, without waiting for collectives in flight or for other ranks.

    This ends NCCL's collectives, even one that another thread waits for. It does not end gloo's, so their connections are
    closed: of any two ranks one has accepted the connection and closes it here. Waiting operations then fail on both sides.
    """
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
        _close_accepted()


def _close_accepted() -> None:
    """Close every TCP connection that this process has accepted: gloo's, and those of the rendezvous store."""
    connections = list(_tcp_sockets())
    listening = {listener.getsockname()[1] for listener in connections if _listens(listener)}
    for connection in connections:
        with connection, contextlib.suppress(OSError):  # the other side may have closed it
            if not _listens(connection) and connection.getsockname()[1] in listening:
                connection.shutdown(socket.SHUT_RDWR)


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, each with a duplicated descriptor; none if the system does not list them."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  only names are needed
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                    continue
                connection = socket.socket(fileno=os.dup(int(name)))
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    yield connection
                else:
                    connection.close()


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_environment(message: Message, port: int) -> None:
    """Set the variables that every launcher sets and from which users' code reads its rank."""
    os.environ |= {
        "RANK": str(message["rank"]),
        "WORLD_SIZE": str(message["world_size"]),
        "LOCAL_RANK": str(message["local_rank"]),
        "LOCAL_WORLD_SIZE": str(message["local_world_size"]),
        "MASTER_ADDR": message["address"],
        "MASTER_PORT": str(port),
    }
