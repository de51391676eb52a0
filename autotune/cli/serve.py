"""`autotune serve`, `autotune worker`, `autotune keys`: the service, who runs its jobs, and who may use it."""

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType

from rich.table import Table

from autotune.cli import ROOT, bind_own_rooms
from autotune.cli.console import Console
from autotune.cli.passed import pass_environment
from autotune.cli.quota import parsed_quotas
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.jobs.allowed import AllowList
from autotune.jobs.command_field import parse_allowed
from autotune.jobs.ray_cluster import named_address
from autotune.jobs.request import RUNNERS
from autotune.jobs.stop import StopSignal
from autotune.jobs.worker import Worker
from autotune.logs import LogFormat, set_up_logs
from autotune.network import is_loopback
from autotune.quick_calibration import calibrate_quickly
from autotune.runners import make_replay_runner, make_runner
from autotune.telemetry import traces
from executor.detect import local_gpus
from search_spaces.cluster import DEVICE_KINDS
from search_spaces.clusters import local_cluster
from search_spaces.plain import to_plain
from storage.address import readable_by_others
from storage.records import QueueLimits, Scope
from storage.service_records import Quotas
from storage.sql import default_database_url, open_store

log = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command line gave."""

    host: str
    port: int
    database: str | None
    keys: bool | None
    """Whether keys are asked for; None: unless bound to loopback."""
    worker: bool
    factories: tuple[str, ...]
    commands: tuple[str, ...]
    requests_per_second: float
    quotas: tuple[str, ...]
    """NAME=LIMIT of what each owner may take."""
    webhook_networks: tuple[str, ...]
    ray_address: str | None
    """Of the Ray that the worker's jobs run on; None: the environment's, else one of their own."""
    pass_environment: tuple[str, ...]
    """Variables that the worker's trials find."""
    log_format: LogFormat
    access_log: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What the command line gave."""

    database: str | None
    running_jobs: int | None
    device_seconds: float | None
    runners: tuple[str, ...]
    devices: tuple[str, ...]
    replay: Path | None
    most_jobs: int | None
    ray_address: str | None
    factories: tuple[str, ...]
    commands: tuple[str, ...]
    pass_environment: tuple[str, ...]
    log_format: LogFormat
    until_input_ends: bool


def serve_command(options: ServeOptions) -> Status:
    """Run the API, and a worker beside it, until a signal ends both."""
    # Imported here: it is not needed for anything else.
    import uvicorn

    bind_own_rooms(("api",))
    pass_environment(options.pass_environment)
    for command in options.commands:
        parse_allowed(command)
    quotas = parsed_quotas(options.quotas)
    set_up_logs(options.log_format)
    url = options.database or default_database_url()
    loopback = is_loopback(options.host)
    require_keys = not loopback if options.keys is None else options.keys
    if readable := readable_by_others(url):
        log.warning("%s: can be read by other users of this machine; chmod 600 %s", readable, readable)
    with open_store(url) as store:
        # Here, so that what is wrong is told before anything listens.
        usable = [key for key in store.keys() if key.revoked is None]  # noqa: SIM118  a store is no dict
        if require_keys and not usable:
            raise RequestError(
                "host",
                "API keys are asked for, and there is none",
                "make one with `autotune keys create`, or bind to 127.0.0.1",
            )
    if not loopback and not require_keys:
        raise RequestError(
            "host", f"{options.host} is reached from other machines", "leave out --no-keys, or bind to 127.0.0.1"
        )
    os.environ["AUTOTUNE_SERVER"] = json.dumps(
        {
            "database_url": url, "host": options.host, "require_keys": require_keys,
            "factories": list(options.factories), "commands": list(options.commands),
            "requests_per_second": options.requests_per_second, "quotas": to_plain(quotas),
            "webhook_networks": list(options.webhook_networks), "access_log": options.access_log,
        }
    )  # fmt: skip
    # Bound before a worker starts and anything is printed, because the port may be in use.
    with (
        traces("autotune-api"),
        _bound(options.host, options.port) as listener,
        _worker(url, options, quotas) if options.worker else contextlib.nullcontext(),
    ):
        config = uvicorn.Config(
            "api.server:make_app", factory=True, host=options.host, port=options.port, access_log=False,
            timeout_graceful_shutdown=5, server_header=False, log_level="warning", log_config=None,
        )  # fmt: skip
        Console(stderr=True).print(
            f"listening on http://{options.host}:{options.port} (API keys {'asked for' if require_keys else 'not asked for'})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        server = uvicorn.Server(config)
        # When it has shut down it raises the signal once more, by which this process would die before its worker has ended.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        server.run(sockets=[listener])
    return Status.OK if server.started else Status.FAILURE


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        RequestError: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RequestError(
                "port", f"{port} of {host} is in use", "end what listens there, or give another --port"
            ) from None
        why = (error.strerror or str(error)).lower()
        raise RequestError("host", f"cannot listen on {host}:{port} ({why})", "give an address of this machine") from None


@contextlib.contextmanager
def _worker(url: str, options: ServeOptions, quotas: Quotas) -> Iterator[None]:
    """A worker in a process of its own, so that ranks and what they load are none of the server's."""
    # In its own group: Ctrl-C in the terminal is for the server, which then ends the worker.
    main = f"import sys; sys.path.insert(0, {ROOT!r}); from autotune.cli import main; sys.path.remove({ROOT!r}); main()"
    there = [] if options.ray_address is None else ["--ray-address", options.ray_address]
    if quotas.device_hours is not None:
        there += ["--device-seconds", str(3600 * quotas.device_hours)]
    there += [word for factory in options.factories for word in ("--allow-factory", factory)]
    there += [word for allowed in options.commands for word in ("--allow-command", allowed)]
    command = [sys.executable, "-P", "-c", main, "worker", "--until-input-ends", "--log-format", options.log_format, *there]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"AUTOTUNE_DB": url}, process_group=0)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def worker_command(options: WorkerOptions) -> Status:
    """Take and run jobs until a signal: the job that is under way goes back to the queue."""
    pass_environment(options.pass_environment)
    for command in options.commands:
        parse_allowed(command)
    _require_known("runner", options.runners, RUNNERS)
    _require_known("device", options.devices, DEVICE_KINDS)
    set_up_logs(options.log_format)
    stop = StopSignal()

    def ended(_number: int, _frame: FrameType | None) -> None:
        stop.request()
        stop.request()

    def input_ended() -> None:
        sys.stdin.read()  # the server holds the other end: it is closed however that ends
        ended(0, None)

    make = make_runner if options.replay is None else make_replay_runner(options.replay)
    limits = QueueLimits(
        running_jobs=options.running_jobs,
        device_seconds=options.device_seconds,
        runners=frozenset(options.runners),
        devices=frozenset(options.devices),
    )
    with traces("autotune-worker"), open_store(options.database or default_database_url()) as store:
        if options.replay is None and local_gpus() is None:
            # So that what forms predict before the first job is of this machine. Other numbers of ranks: with their first job.
            calibrate_quickly(store, local_cluster())
        worker = Worker(
            store,
            make,
            limits,
            ray_address=named_address(options.ray_address),
            allowed=AllowList(factories=options.factories, commands=options.commands),
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # schedulers send either of the last two
            signal.signal(number, ended)
        if options.until_input_ends:
            threading.Thread(target=input_ended, daemon=True).start()
        worker.run(stop, options.most_jobs)
    return Status.OK


def _require_known(field: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuse a name that no job has: the worker would wait for ever."""
    for name in names:
        if name not in known:
            raise RequestError(field, f"{name!r} is not known", f"use some of {', '.join(known)}")


def create_key_command(database: str | None, owner: str, scopes: tuple[str, ...], days: int | None) -> Status:
    """Make a key and print it, once."""
    for scope in scopes:
        if scope not in tuple(Scope):
            raise RequestError("scope", f"{scope!r} is not known", f"use some of {', '.join(Scope)}")
    if not owner or len(owner) > 64 or not owner.isprintable():
        raise RequestError("owner", f"{owner!r} is no name", "give up to 64 printable characters")
    expires = None if days is None else datetime.now(UTC) + timedelta(days=days)
    with open_store(database or default_database_url()) as store:
        key, text = store.create_key(owner, scopes or (Scope.READ, Scope.SUBMIT), expires)
    Console(stderr=True).print(f"key {key.id} of {owner}; it is shown this once:", highlight=False)
    sys.stdout.write(text + "\n")
    return Status.OK


def list_keys_command(database: str | None, as_json: bool) -> Status:
    """All keys, without their secrets."""
    with open_store(database or default_database_url()) as store:
        keys = store.keys()
    if as_json:
        sys.stdout.write(
            json.dumps([to_plain(key) | {"scopes": sorted(key.scopes)} for key in keys], indent=2, default=str) + "\n"
        )
        return Status.OK
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("key", "owner", "scopes", "created (UTC)", "expires", "last use", "revoked"):
        table.add_column(name)
    for key in keys:
        moments = (key.created, key.expires, key.last_used, key.revoked)
        table.add_row(key.id, key.owner, " ".join(sorted(key.scopes)), *(f"{m:%Y-%m-%d %H:%M}" if m else "-" for m in moments))
    Console().print(table, highlight=False)
    return Status.OK


def revoke_key_command(database: str | None, key_id: str) -> Status:
    """End a key."""
    with open_store(database or default_database_url()) as store:
        store.revoke_key(key_id)
    Console(stderr=True).print(f"key {key_id} is revoked", highlight=False)
    return Status.OK
