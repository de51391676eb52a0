"""`autotune serve`: run one API process, or several on one port, and a worker."""

import asyncio
import contextlib
import errno
import json
import logging
import multiprocessing
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import uvicorn

from autotune.cli import ROOT, bind_own_packages
from autotune.cli.administration import parsed_quotas
from autotune.cli.status import Status
from autotune.cli.worker import pass_environment
from autotune.client.transport import is_loopback
from autotune.errors import RequestError
from autotune.logs import LogFormat, set_up_logs, traces
from autotune.request.field_forms import parse_allowed
from autotune.text.console import Console
from search_spaces.plain import to_plain
from storage.address import default_database_url, readable_by_others
from storage.service_records import Quotas
from storage.store import open_store

SHUTDOWN_SECONDS = 30

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Parsed options of the command."""

    host: str
    port: int
    database: str | None
    keys: bool | None
    """Whether API keys are required; None: unless bound to loopback."""
    worker: bool
    workers: int
    """Number of API processes."""
    factories: tuple[str, ...]
    commands: tuple[str, ...]
    requests_per_second: float
    quotas: tuple[str, ...]
    """NAME=LIMIT: default quotas of owners."""
    webhook_networks: tuple[str, ...]
    connections: int
    connections_per_address: int
    header_seconds: float
    trusted_proxies: tuple[str, ...]
    identity_header: str
    groups_header: str
    roles: tuple[str, ...]
    share_days: int
    tls_certificate: Path | None
    tls_key: Path | None
    ray_address: str | None
    """The Ray cluster of the worker's jobs; None: from the environment, else a local Ray per job."""
    pass_environment: tuple[str, ...]
    """Environment variables that are passed to the worker's trials."""
    log_format: LogFormat
    access_log: bool


class ServeConfig(uvicorn.Config):
    """uvicorn's configuration, without TLS at the listeners: `api.connections` starts TLS after counting the connection."""

    tls: ssl.SSLContext | None = None

    def load(self) -> None:
        super().load()
        self.tls, self.ssl = self.ssl, None

    def get_loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        # uvloop reads the first bytes of a handshake before a protocol can prevent it.
        return asyncio.new_event_loop if self.is_ssl else super().get_loop_factory()


def serve_command(options: ServeOptions) -> Status:
    """Run the API and a worker until a signal ends both."""
    bind_own_packages("api")
    pass_environment(options.pass_environment)
    for command in options.commands:
        parse_allowed(command)
    quotas = parsed_quotas(options.quotas)
    url = options.database or default_database_url()
    loopback = is_loopback(options.host)
    require_keys = not loopback if options.keys is None else options.keys
    with open_store(url) as store:
        # Checked here, so that errors are reported before anything listens.
        usable = [key for key in store.keys.all() if key.revoked is None]
        if require_keys and not usable and not options.identity_header:
            raise RequestError(
                "host",
                "API keys are required, but there is none",
                "create one with `autotune keys create`, or bind to 127.0.0.1",
            )
    if not loopback and not require_keys:
        raise RequestError(
            "host", f"{options.host} is reachable from other machines", "leave out --no-keys, or bind to 127.0.0.1"
        )
    _require_tls_files(options.tls_certificate, options.tls_key)
    descriptors = _raised_descriptors()
    # For the database, webhooks and pipes, and for connections that have just been accepted.
    reserved_descriptors = 128
    connections = min(options.connections, descriptors - reserved_descriptors)
    least_connections = 64
    if connections < least_connections:
        remedy = f"allow at least {reserved_descriptors + least_connections}: ulimit -n"
        raise RequestError("descriptors", f"this process may open {descriptors} files and connections", remedy)
    set_up_logs(options.log_format)
    if readable := readable_by_others(url):
        log.warning("%s: can be read by other users of this machine; chmod 600 %s", readable, readable)
    settings = {
        "database_url": url, "host": options.host, "require_keys": require_keys,
        "factories": list(options.factories), "commands": list(options.commands),
        "requests_per_second": options.requests_per_second, "quotas": to_plain(quotas),
        "webhook_networks": list(options.webhook_networks), "access_log": options.access_log,
        "connections": connections, "connections_per_address": min(options.connections_per_address, max(1, connections // 2)),
        "header_seconds": options.header_seconds,
        "trusted_proxies": list(options.trusted_proxies), "identity_header": options.identity_header,
        "groups_header": options.groups_header, "roles": list(options.roles), "share_days": options.share_days,
    }  # fmt: skip
    _require_settings(settings)
    os.environ["AUTOTUNE_SERVER"] = json.dumps(settings)
    # Listen backlog with few and with many descriptors. Waiting connections are accepted all at once.
    backlogs = (32, 1024)
    # Bound before a worker starts and anything is printed, because the port may be in use.
    with contextlib.ExitStack() as stack:
        stack.enter_context(traces("autotune-api"))
        if options.workers > 1:
            _bound(options.host, options.port, shared=False).close()  # otherwise the port could be shared with another server
        listeners = [
            stack.enter_context(_bound(options.host, options.port, options.workers > 1)) for _ in range(options.workers)
        ]
        if options.worker:
            stack.enter_context(_worker(url, options, quotas))
        config = ServeConfig(
            "api.app:make_app", factory=True, http="api.connections:BoundedProtocol",
            host=options.host, port=options.port, access_log=False, server_header=False, log_config=None,
            log_level="error",  # lower levels log a line for each malformed request
            proxy_headers=False,  # the app reads them, after who the person is
            timeout_graceful_shutdown=5, ws="none",
            backlog=backlogs[descriptors - connections > 2 * backlogs[1]],
            ssl_certfile=options.tls_certificate, ssl_keyfile=options.tls_key,
        )  # fmt: skip
        scheme = "http" if options.tls_certificate is None else "https"
        processes = "" if options.workers == 1 else f", {options.workers} processes"
        Console(stderr=True).print(
            f"listening on {scheme}://{options.host}:{options.port} "
            f"(API keys {'required' if require_keys else 'not required'}{processes})", soft_wrap=True,
        )  # fmt: skip
        if options.workers > 1:
            return _run_several(config, listeners, options.log_format)
        return _run_one(config, listeners[0])


def _run_one(config: uvicorn.Config, listener: socket.socket) -> Status:
    server = uvicorn.Server(config)
    # uvicorn raises the signal again after shutdown, which would kill this process before its worker has ended.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])
    return Status.OK if server.started else Status.FAILURE


def _run_several(config: uvicorn.Config, listeners: Sequence[socket.socket], log_format: LogFormat) -> Status:
    """Run one process per listener until a signal arrives.

    A process that is ended by a signal is replaced. Connections to its listener wait for the replacement, because this process
    keeps the listener open. If a process fails, its replacement would fail too, so all are ended.
    """
    ended = threading.Event()
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, lambda *_: ended.set())

    def start(listener: socket.socket) -> SpawnProcess:
        process = multiprocessing.get_context("spawn").Process(target=_run_child, args=(config, listener, log_format))
        process.start()
        return process

    status = Status.OK
    processes = [start(listener) for listener in listeners]
    while not ended.wait(0.5):
        for number, process in enumerate(processes):
            if process.exitcode is None or ended.is_set():
                continue
            if process.exitcode > 0:
                status = Status.FAILURE
                ended.set()
            else:
                log.error("API process %d was ended by a signal; starting another", process.pid)
                processes[number] = start(listeners[number])
    for process in processes:
        process.terminate()
    until = time.monotonic() + SHUTDOWN_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()
    return status


def _run_child(config: uvicorn.Config, listener: socket.socket, log_format: LogFormat) -> None:
    """Main function of one of several API processes."""
    bind_own_packages("api")
    set_up_logs(log_format)
    config.configure_logging()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with traces("autotune-api"):
        status = _run_one(config, listener)
    sys.exit(status)


def _end_with_parent() -> None:
    """End this process when its parent has ended for any reason; otherwise it would keep the port."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _require_settings(settings: dict[str, Any]) -> None:
    """Refuse settings with which no process could start.

    Raises:
        RequestError: a setting is invalid.
    """
    from importlib import import_module

    # By name, because this layer must not import the one above it.
    import_module("api.app").settings_of(json.dumps(settings))


def _require_tls_files(certificate: Path | None, key: Path | None) -> None:
    """Refuse a certificate and a key that cannot be used.

    Raises:
        RequestError: one is missing or unreadable, they do not belong together, or the key has a password.
    """
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        present, missing = ("tls_key", "tls_certificate") if certificate is None else ("tls_certificate", "tls_key")
        raise RequestError(missing, f"is missing, and {present} is given", "give both, as PEM files")
    for name, path in (("tls_certificate", certificate), ("tls_key", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            problem = f"{path} cannot be read ({(error.strerror or str(error)).lower()})"
            raise RequestError(name, problem, "give a PEM file that this user may read") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        problem = f"{certificate} and {key} cannot be used ({getattr(error, 'reason', None) or error})"
        raise RequestError("tls_certificate", problem, "give a PEM certificate and its key, without a password") from None


def _raised_descriptors() -> int:
    """Raise the limit of open files and connections of this process and its children as far as possible, and return it."""
    most_descriptors = 65_536
    if sys.platform == "win32":
        return most_descriptors
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = most_descriptors if hard == resource.RLIM_INFINITY else min(hard, most_descriptors)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return most_descriptors if soft == resource.RLIM_INFINITY else soft


def _bound(host: str, port: int, shared: bool) -> socket.socket:
    """A listening socket; `shared`: several sockets of ours share the port, and the kernel balances connections.

    Raises:
        RequestError: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, reuse_port=shared)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RequestError(
                "port", f"{port} of {host} is in use", "stop the process that listens there, or give another --port"
            ) from None
        why = (error.strerror or str(error)).lower()
        raise RequestError("host", f"cannot listen on {host}:{port} ({why})", "give an address of this machine") from None


@contextlib.contextmanager
def _worker(url: str, options: ServeOptions, quotas: Quotas) -> Iterator[None]:
    """Run a worker in a separate process, to isolate the server from ranks and their imports."""
    # In its own process group: Ctrl-C in the terminal goes to the server, which then ends the worker.
    main = f"import sys; sys.path.insert(0, {ROOT!r}); from autotune.cli import main; sys.path.remove({ROOT!r}); main()"
    worker_options = [] if options.ray_address is None else ["--ray-address", options.ray_address]
    if quotas.device_hours is not None:
        worker_options += ["--device-seconds", str(3600 * quotas.device_hours)]
    worker_options += [word for factory in options.factories for word in ("--allow-factory", factory)]
    worker_options += [word for allowed in options.commands for word in ("--allow-command", allowed)]
    command = [sys.executable, "-P", "-c", main, "worker", "--until-input-ends", "--log-format", options.log_format]
    process = subprocess.Popen(
        [*command, *worker_options], stdin=subprocess.PIPE, env=os.environ | {"AUTOTUNE_DB": url}, process_group=0
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
