"""`autotune worker` and `autotune keys`: run the jobs of the service, and manage access to it."""

import signal
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType

from rich.table import Table

from autotune.cli.documents import write_document
from autotune.cli.passed import pass_environment
from autotune.cli.status import Status
from autotune.cluster.ray_cluster import named_address
from autotune.errors import RequestError
from autotune.loop.stop import StopSignal
from autotune.loop.worker import Worker
from autotune.ops.logs import LogFormat, set_up_logs, traces
from autotune.request.field_forms import parse_allowed
from autotune.request.request import RUNNERS
from autotune.session.allowed import AllowList
from autotune.session.calibrate import calibrate_quickly
from autotune.session.runners import make_replay_runner, make_runner
from autotune.text.console import Console
from executor.detect import local_gpus
from search_spaces.clusters.cluster import DEVICE_KINDS
from search_spaces.clusters.presets import local_cluster
from search_spaces.plain import to_plain
from storage.address import default_database_url
from storage.records import QueueLimits, Scope
from storage.store import open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Parsed options of the command."""

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


def worker_command(options: WorkerOptions) -> Status:
    """Take and run jobs until a signal; the running job then goes back to the queue."""
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
        sys.stdin.read()  # the server holds the other end, which is closed however the server ends
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
            # So that predictions in forms fit this machine before the first job. Other rank counts: with their first job.
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


def _require_known(field: str, names: tuple[str, ...], known_names: tuple[str, ...]) -> None:
    """Refuse a name that no job can have: the worker would wait forever."""
    for name in names:
        if name not in known_names:
            raise RequestError(field, f"{name!r} is not known", f"use some of {', '.join(known_names)}")


def create_key_command(database: str | None, owner: str, scopes: tuple[str, ...], days: int | None) -> Status:
    """Create a key and print it once."""
    for scope in scopes:
        if scope not in tuple(Scope):
            raise RequestError("scope", f"{scope!r} is not known", f"use some of {', '.join(Scope)}")
    if not owner or len(owner) > 64 or not owner.isprintable():
        raise RequestError("owner", f"{owner!r} is not a name", "give up to 64 printable characters")
    expires = None if days is None else datetime.now(UTC) + timedelta(days=days)
    with open_store(database or default_database_url()) as store:
        key, text = store.keys.create(owner, scopes or (Scope.READ, Scope.SUBMIT), expires)
    Console(stderr=True).print(f"key {key.id} of {owner}; it is shown only once:", highlight=False)
    sys.stdout.write(text + "\n")
    return Status.OK


def list_keys_command(database: str | None, as_json: bool) -> Status:
    """Print all keys, without their secrets."""
    with open_store(database or default_database_url()) as store:
        keys = store.keys.all()
    if as_json:
        write_document([to_plain(key) | {"scopes": sorted(key.scopes)} for key in keys], default=str)
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
    """Revoke a key."""
    with open_store(database or default_database_url()) as store:
        store.keys.revoke(key_id)
    Console(stderr=True).print(f"key {key_id} is revoked", highlight=False)
    return Status.OK
