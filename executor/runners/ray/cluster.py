"""Ray itself: joined where it runs, started where it does not."""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import ray

from executor.errors import RunnerError
from executor.runners.rank_environment import hidden_from_children
from executor.runners.ray.token import MODE, put_mode_back, token_told

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""Messages between ranks and the runner are a few kilobytes."""
CONNECT_SECONDS = 3.0
"""Time for the head of a cluster to accept a connection, and again to answer it."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2 begins with, and an empty SETTINGS frame."""
FRAME_HEADER_BYTES, SETTINGS = 9, b"\x04"
"""A frame's type is the fourth byte of its header."""


class RayCluster:
    """The connection to Ray. One that is there already is used and left alone; one that is made here is ended by `close`."""

    def __init__(self, address: str | None, cores: int) -> None:
        began = time.monotonic()
        self.started = not ray.is_initialized()
        self._token_mode = os.environ.get(MODE)
        if self.started:
            try:
                with _handlers_kept(), token_told(address):
                    _connect(address, cores)
            except BaseException:
                self.close()
                raise
        self.startup_seconds = time.monotonic() - began

    def close(self) -> None:
        """Disconnect, and end the Ray that was started here. May be called twice."""
        if self.started:
            if ray.is_initialized():
                ray.shutdown()
            put_mode_back(self._token_mode)
        self.started = False


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Let Ctrl-C take effect afterwards: a Ray that was interrupted while it started leaves its agents behind.

    And leave SIGTERM to whoever handles it: Ray takes it for itself and ends the process by it, whatever is under way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if callable(terminated):  # where nobody does, Ray's own way ends what it has started
            signal.signal(signal.SIGTERM, terminated)
    if came and callable(former):
        former(*came[0])


def _require_answer(address: str) -> None:
    """Connect before Ray does, which tries for minutes and logs each attempt from native code.

    The head speaks gRPC, so it answers the preface of HTTP/2 with a SETTINGS frame [RFC 9113, 3.4]. Another program on that
    port does not, nor does a head that hangs.

    Raises:
        RunnerError: the address is none, nobody listens there, or it is no Ray that does.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise RunnerError(f"{address} is no address of a Ray cluster; give the head's HOST:PORT (6379 where none was chosen)")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as head:
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):  # else it answers a TLS handshake first
                head.sendall(HTTP2_PREFACE)
                with head.makefile("rb") as answer:
                    header = answer.read(FRAME_HEADER_BYTES)
                if header[3:4] != SETTINGS:
                    raise _no_answer(address, "what listens there is no Ray head")
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise _no_answer(address, why) from error


def _no_answer(address: str, why: str) -> RunnerError:
    return RunnerError(f"the Ray cluster at {address} does not answer: {why}; check the address with `ray status`")


def _connect(address: str | None, cores: int) -> None:
    if address is not None:
        _require_answer(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"num_cpus": cores, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        # A Ray that starts here gives its processes this one's environment.
        with hidden_from_children() if address is None else contextlib.nullcontext():
            ray.init(address=address or "local", **options)
        _keep_out_of_stdout()
    except Exception as error:
        # It is not initialized, but of a cluster that has refused Ray keeps a client, by which the next start hangs, and which
        # ends this process without a word a minute after that cluster is gone.
        ray.shutdown()
        lines = str(error).split("\n") if str(error).strip() else [type(error).__name__]
        if lines[0].startswith("Version mismatch"):
            raise RunnerError(_version_mismatch(lines)) from error
        if address is not None:
            raise _no_answer(address, lines[0].strip()) from error
        raise RunnerError(f"Ray does not start on this machine: {lines[0].strip()}; use the local runner") from error


def _keep_out_of_stdout() -> None:
    """Log what Ray would print there, with `log_to_driver` off too, when a node dies: there a command writes its JSON.

    `print_to_stdstream` is Ray's own and has no switch (2.60: `listen_error_messages`); where another version has it not, its
    notes are printed as Ray prints them.
    """
    module = ray._private.worker
    if hasattr(module, "print_to_stdstream"):
        module.print_to_stdstream = lambda data, *_, **__: log.info("%s", "\n".join(map(str, data.get("lines", ()))))


def _version_mismatch(lines: list[str]) -> str:
    """Ray's own lines, "Ray: VERSION" and "Python: VERSION" of the cluster and then of this process, as one."""
    told = [line.strip().replace(":", "") for line in lines if line.strip().startswith(("Ray:", "Python:"))]
    theirs, ours = " and ".join(told[:2]), " and ".join(told[2:4])
    return f"the Ray cluster runs {theirs}, this process {ours}; use the same versions on every node"
