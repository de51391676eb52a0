"""`autotune worker`: run the jobs of the service."""

import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from autotune.cli.options import Database, Logs, PassEnvironment, RayAddress
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.logs import LogFormat, set_up_logs, traces
from executor.runners.rank_process import PASSED_VARIABLE, passed_names

AllowFactory = Annotated[
    list[str] | None,
    typer.Option("--allow-factory", metavar="MODULE:NAME", help="A factory that requests may name. May be repeated."),
]
AllowCommand = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-command",
        metavar="FOLDER:COMMAND",
        help="Required beginning of submitted commands, and their working directory. May be repeated.",
    ),
]


def worker(
    running_jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum concurrent jobs of one submitter. [default: no limit]")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Exit after this many jobs. [default: never]")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Take trial results from this file of measurements instead of running trials."),
    ] = None,
    runner: Annotated[
        list[str] | None,
        typer.Option("--runner", metavar="NAME", help="Take only jobs of this runner. May be repeated. [default: all]"),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", metavar="KIND", help="Take only jobs for cpu, or for cuda. [default: all]")
    ] = None,
    device_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="N", help="Device-seconds of a submitter per day (UTC), after which none of their jobs starts."
        ),
    ] = None,
    ray_address: RayAddress = None,
    allow_factory: AllowFactory = None,
    allow_command: AllowCommand = None,
    pass_environment: PassEnvironment = None,
    log_format: Logs = LogFormat.TEXT,
    until_input_ends: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
    db: Database = None,
) -> Status:
    """Take submitted jobs from a database and run them until a signal arrives."""
    # Imported on demand: `autotune --help` loads nothing heavy.
    from autotune.cli.worker import pass_environment as pass_variables
    from autotune.loop.listener import StopSignal
    from autotune.loop.worker import Worker
    from autotune.ray_cluster import named_address
    from autotune.request.field_forms import parse_allowed
    from autotune.request.job_fields import RUNNERS
    from autotune.session.allowed import AllowList
    from autotune.session.calibrate import calibrate_quickly
    from autotune.session.trial_requests import make_replay_runner, make_runner
    from executor.detect import local_gpus
    from search_spaces.clusters.cluster import DEVICE_KINDS
    from search_spaces.clusters.presets import local_cluster
    from storage.address import default_database_url
    from storage.records import QueueLimits
    from storage.store import open_store

    pass_variables(pass_environment or ())
    allowed_commands, runners, devices = tuple(allow_command or ()), tuple(runner or ()), tuple(device or ())
    for command in allowed_commands:
        parse_allowed(command)
    _require_known("runner", runners, RUNNERS)
    _require_known("device", devices, DEVICE_KINDS)
    set_up_logs(log_format)
    stop = StopSignal()

    def ended(_number: int, _frame: FrameType | None) -> None:
        stop.request()
        stop.request()

    def input_ended() -> None:
        sys.stdin.read()  # the server holds the other end, which is closed however the server ends
        ended(0, None)

    local_kinds = ("cpu",) if local_gpus() is None else ("cpu", "cuda")
    make = make_runner if replay is None else make_replay_runner(replay)
    limits = QueueLimits(
        running_jobs=running_jobs, device_seconds=device_seconds, runners=frozenset(runners), devices=frozenset(devices),
        # Jobs for devices that this machine lacks are left to other workers; a Ray cluster has devices elsewhere.
        local_devices=frozenset(local_kinds if replay is None and named_address(ray_address) is None else ()),
    )  # fmt: skip
    with traces("autotune-worker"), open_store(db or default_database_url()) as store:
        if replay is None and "cuda" not in local_kinds:
            # So that predictions in forms fit this machine before the first job. Other rank counts: with their first job.
            calibrate_quickly(store, local_cluster())
        running = Worker(
            store,
            make,
            limits,
            ray_address=named_address(ray_address),
            allowed=AllowList(factories=tuple(allow_factory or ()), commands=allowed_commands),
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # schedulers send either of the last two
            signal.signal(number, ended)
        if until_input_ends:
            threading.Thread(target=input_ended, daemon=True).start()
        running.run(stop, jobs)
    return Status.OK


def _require_known(field: str, names: tuple[str, ...], known_names: tuple[str, ...]) -> None:
    """Refuse a name that no job can have: the worker would wait forever."""
    for name in names:
        if name not in known_names:
            raise RequestError(field, f"{name!r} is not known", f"use some of {', '.join(known_names)}")


def pass_environment(names: Sequence[str]) -> None:
    """Pass these variables to trials of this process, and of a worker that it starts.

    Raises:
        RequestError: a name is invalid, or is not set here.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise RequestError("pass_environment", f"{name!r} is not a variable name", "give the name without its value")
        if name not in os.environ:
            raise RequestError("pass_environment", f"{name} is not set here", "set it, or leave it out")
    if names:
        os.environ[PASSED_VARIABLE] = " ".join(dict.fromkeys([*passed_names(os.environ), *names]))
