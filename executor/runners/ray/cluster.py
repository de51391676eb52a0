"""The connection to Ray: joins a running cluster or starts one, with its authentication token.

We do not send it by default: this process would then require it from the nodes in turn, and a cluster without a token has none.
A Ray that is started here requires one, and Ray applies that to this whole process from then on, unless it is reset.
"""

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
from executor.runners.rank_process import hidden_from_children

log = logging.getLogger(__name__)
CONNECT_SECONDS = 3.0
"""Time for the head of a cluster to accept a connection, and again to answer it."""


class RayCluster:
    """The connection to Ray. An existing connection is used and kept open; one that is made here is closed by `close`."""

    def __init__(self, address: str | None, cores: int) -> None:
        began = time.monotonic()
        self.started = not ray.is_initialized()
        self._token_mode = os.environ.get(MODE)
        if self.started:
            try:
                with _preserve_signal_handlers(), explain_token_error(address):
                    _connect(address, cores)
            except BaseException:
                self.close()
                raise
        self.startup_seconds = time.monotonic() - began

    def close(self) -> None:
        """Disconnect, and stop the Ray that was started here. May be called twice."""
        if self.started:
            if ray.is_initialized():
                ray.shutdown()
            restore_token_mode(self._token_mode)
        self.started = False


@contextlib.contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended: if Ray's start is interrupted, its agents are left behind.

    Also restore the existing SIGTERM handler: Ray installs its own, which ends the process immediately.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append((number, frame)))
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if callable(terminated):  # without a handler, Ray's own ends the processes that it has started
            signal.signal(signal.SIGTERM, terminated)
    if interrupts and callable(former):
        former(*interrupts[0])


def _require_answer(address: str) -> None:
    """Check that the head answers before Ray connects: Ray retries for minutes and logs each attempt from native code.

    The head speaks gRPC, so it answers the HTTP/2 preface with a SETTINGS frame [RFC 9113, 3.4]. Another program on that port
    does not, and neither does a head that hangs.

    Raises:
        RunnerError: the address is invalid, nothing listens there, or the listener is not Ray.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise RunnerError(f"{address} is not the address of a Ray cluster; give the head's HOST:PORT (default port: 6379)")
    # A frame's type is the fourth byte of its header.
    frame_header_bytes, settings = 9, b"\x04"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as head:
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):  # with TLS a handshake comes first
                # The preface and an empty SETTINGS frame.
                head.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
                with head.makefile("rb") as answer:
                    header = answer.read(frame_header_bytes)
                if header[3:4] != settings:
                    raise _no_answer(address, "what listens there is not a Ray head")
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
        # Ray's own default is 15: beside any other work on this machine its ranks would hardly compute.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Messages between ranks and the runner are a few kilobytes.
        options |= {"num_cpus": cores, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    try:
        # A Ray that is started here passes this process's environment to its processes.
        with hidden_from_children() if address is None else contextlib.nullcontext():
            ray.init(address=address or "local", **options)
        # Log what Ray would print when a node dies, even with `log_to_driver` off: commands write their JSON to stdout. The
        # function is private to Ray and cannot be switched off (2.60: `listen_error_messages`); without it Ray prints.
        if hasattr(ray._private.worker, "print_to_stdstream"):
            ray._private.worker.print_to_stdstream = lambda data, *_, **__: log.info(
                "%s", "\n".join(map(str, data.get("lines", ())))
            )
    except Exception as error:
        # Ray is not initialized, but it keeps the client of a cluster that has refused it. With that client the next start
        # hangs, and this process ends silently a minute after that cluster has ended.
        ray.shutdown()
        lines = str(error).split("\n") if str(error).strip() else [type(error).__name__]
        if lines[0].startswith("Version mismatch"):
            # Ray's own lines: "Ray: VERSION" and "Python: VERSION" of the cluster, and then of this process.
            versions = [line.strip().replace(":", "") for line in lines if line.strip().startswith(("Ray:", "Python:"))]
            theirs, ours = " and ".join(versions[:2]), " and ".join(versions[2:4])
            problem = f"the Ray cluster runs {theirs}, this process {ours}; use the same versions on every node"
            raise RunnerError(problem) from error
        if address is not None:
            raise _no_answer(address, lines[0].strip()) from error
        raise RunnerError(f"Ray does not start on this machine: {lines[0].strip()}; use the local runner") from error


MODE = "RAY_AUTH_MODE"
"""The variable that makes Ray require and send a token."""


def restore_token_mode(former: str | None) -> None:
    """Restore this process's token mode, which a Ray that was started here has changed. That Ray must have ended.

    `former`: the value of `MODE` before the start; None: it was not set.
    """
    if os.environ.get(MODE) == former:
        return
    os.environ.pop(MODE, None)
    if former is not None:
        os.environ[MODE] = former
    raylet = ray._raylet
    if hasattr(raylet, "AuthenticationTokenLoader"):  # private to Ray (2.60); older versions have no tokens
        # In this order: a thread of the ended Ray may still look for the token.
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def explain_token_error(address: str | None) -> Iterator[None]:
    """Replace the error of a cluster that requires its token by one that says so, with the remedy.

    Raises:
        RunnerError: in place of the original error.
    """
    try:
        yield
    except RunnerError as error:
        if not _is_unauthenticated(error):
            raise
        remedy = "set RAY_AUTH_MODE=token, with the file ~/.ray/auth_token of its head (or RAY_AUTH_TOKEN)"
        raise RunnerError(f"the Ray cluster at {address} asks for its token; {remedy}") from error


def _is_unauthenticated(error: BaseException) -> bool:
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, ray.exceptions.AuthenticationError):
            return True
        reason = reason.__cause__ or reason.__context__
    return False
