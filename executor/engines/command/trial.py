"""One trial of a user's script: starts it on every rank, watches it, agrees on when it is over, and makes the result."""

import contextlib
import dataclasses
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from executor import process_tree
from executor.engine import RankContext
from executor.engines.command.launchers import (
    Launch,
    RankPlacement,
    checkpoints_in,
    file_states,
    folder_kind,
    launcher_command,
    launcher_environment,
    make_working_folder,
    python_command,
    working_path,
)
from executor.engines.command.observed import FEWEST_STEPS, install_probe
from executor.engines.command.result import facts_of, result_of
from executor.engines.command.watch import FAILURES, ScriptWatch, State
from executor.errors import EngineRefusalError, failure_table
from executor.measurement.memory import SLACK_BYTES
from executor.measurement.trial_report import Trial, gather_numbers, gather_plain
from executor.process_tree import remove_shared_memory
from search_spaces.models.command import CommandModel
from search_spaces.placeholders import (
    TEMPLATE,
    TRIAL_FOLDER,
    accelerate_accumulation,
    environment_of,
    names_in,
    template_of,
    words_of,
)
from search_spaces.trial import TrialRequest, TrialResult


@contextlib.contextmanager
def trial_folder() -> Iterator[Path]:
    """A temporary folder of this rank, removed when the trial ends."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-trial-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_launch(
    trial: Trial, command: CommandModel, placement: RankPlacement, folder: Path, linked: Path | None, on_cpu: bool
) -> Launch:
    """Build the launch of this rank's script, which runs in `linked` instead of the user's folder unless that is None."""
    request = trial.request
    config, work = request.config, request.workload
    files = _write_files(request.files, folder)
    paths = {TRIAL_FOLDER: str(placement.folder), **{name: str(path) for name, path in files.items()}}
    if command.template:
        paths[TEMPLATE] = str(folder / f"filled-{command.template_name}")
        Path(paths[TEMPLATE]).write_text(template_of(command, config, work, request.world_size, paths), encoding="utf-8")
    words = words_of(command, config, work, request.world_size, paths)
    if TRIAL_FOLDER in names_in(command):
        placement.folder.mkdir(parents=True, exist_ok=True)
    accumulation = accelerate_accumulation(command, config, work.global_batch_size, request.world_size)
    variables = {
        **launcher_environment(command, placement, config, accumulation, files, on_cpu),
        **_extensions_variable(command, files),
        "AUTOTUNE_REPORT": str(folder / "report.jsonl"),
        **environment_of(command, config),
    }
    python_path = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    variables |= install_probe(folder, python_path, linked, request.profiled_steps)
    limit = request.memory_limit_bytes
    return Launch(
        words=tuple(launcher_command(command.launcher, python_command(words), placement)),
        # Output is unbuffered, and faults print a traceback.
        environment={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **variables},
        folder=command.folder if linked is None else str(linked),
        # The resident set decides the outcome; this limit stops a process that would exhaust the host before the next look.
        data_limit=2 * limit + SLACK_BYTES if on_cpu and limit is not None else None,
        shared_memory=process_tree.shared_memory(placement.address, placement.port),
    )


def _write_files(files: tuple[tuple[str, str], ...], folder: Path) -> dict[str, Path]:
    """Write the files; return placeholder -> path of each."""
    written: dict[str, Path] = {}
    for name, content in files:
        path = folder / name
        path.write_text(content, encoding="utf-8")
        written[path.stem] = path
    return written


def _extensions_variable(command: CommandModel, files: Mapping[str, Path]) -> dict[str, str]:
    """The folder of compiled extensions, for a script that may use DeepSpeed. A folder that the user has set is kept."""
    compiles = command.launcher == "deepspeed" or "config" in files
    if not compiles or process_tree.EXTENSIONS_VARIABLE in os.environ:
        return {}
    return {process_tree.EXTENSIONS_VARIABLE: str(process_tree.extensions_folder())}


def gather_placement(context: RankContext, folder: Path) -> RankPlacement:
    """Gather the hosts, port, folders and devices of all ranks; return the placement of this rank's script.

    `folder`: this rank's temporary folder; that of rank 0 holds the folder of the trial.
    """
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    rows: list[dict[str, Any]] = gather_plain(
        context,
        {
            "host": socket.gethostname(),
            "address": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "port": port,
            "folder": str(folder / "run"),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        },
    )
    hosts = list(dict.fromkeys(row["host"] for row in rows))
    mine = rows[context.rank]["host"]
    same_host = [rank for rank, row in enumerate(rows) if row["host"] == mine]
    return RankPlacement(
        rank=context.rank,
        world_size=context.world_size,
        local_rank=same_host.index(context.rank),
        local_world_size=len(same_host),
        node=hosts.index(mine),
        nodes=len(hosts),
        address=rows[0]["address"],
        port=rows[0]["port"],
        folder=Path(rows[0]["folder"]),
        visible_devices=devices_of_host([rows[rank]["visible"] for rank in same_host]),
    )


def devices_of_host(visible: list[str | None]) -> str | None:
    """All devices of the host in rank order, if each rank sees a different one (as under Ray); else None."""
    if len(set(visible)) < 2:
        return None
    devices = [device for shown in visible for device in (shown or "").split(",") if device]
    return ",".join(dict.fromkeys(devices))


TICK_SECONDS = 0.1
"""Interval at which ranks look at their scripts and exchange their state."""
ABORT_SECONDS = 0.5
"""Time for a hanging script to print its stack traces."""
GRACE_SECONDS = 1.0
"""Wait after the first failure for other ranks' failures, since the cause may be reported after its consequences."""
APART_SECONDS = 5.0
"""Wait after the first measured rank for a rank with hardly a step, which then trains by itself (`disagreement`)."""
PORTS = 3
"""Number of ports that are tried for a script's process group, in case another program takes one in between."""


class ScriptEnd(StrEnum):
    """Why a trial of a script is over."""

    MEASURED = "measured"
    """Its steps were timed, or it has ended by itself."""
    FAILED = "failed"
    """A rank's script is in one of `FAILURES`."""
    SILENT = "silent"
    """It runs, and has reported nothing within `first_report` seconds."""
    HANGING = "hanging"
    """The trial's time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUpdate:
    """What a rank sends to the others after every look: only numbers, since it is sent ten times a second."""

    state: float
    reports: float
    elapsed: float
    busy: float
    phase: float
    rate: float
    observed: float
    """Steps that its probe has counted; infinite where it cannot."""


def run_script(trial: Trial) -> TrialResult:
    """Run the user's command on every rank; every rank of the gang calls it, and gets the same result.

    1. Fill in the command and write its files; agree on a port; start the script as its launcher would.
    2. Look at it ten times a second (`ScriptWatch`): reports, output, memory, exit. Send the state to the other ranks.
    3. All ranks reach the same conclusion from the same rows (`conclude`), so that no error has to be raised and the ranks stay
       warm however the script ends.
    4. End the scripts; those that hang first print their stack traces.
    5. Gather the facts of each rank and make one result from them (`result_of`).
    6. A script that ended by itself without a measurement may have resumed from checkpoints of the user's own runs. It runs
       once more without them.

    Raises:
        EngineRefusalError: the request has no command.
    """
    command = trial.request.model
    if not isinstance(command, CommandModel):
        raise EngineRefusalError("command-model", "the command engine runs a command; write it after --")
    began = time.monotonic()
    left_out: tuple[str, ...] = ()
    for _ in range(PORTS):
        run = _run_once(trial, command, time.monotonic() - began, left_out)
        is_measured = run.result.cause != "not-measured"
        if not is_measured and run.checkpoints and not left_out:
            left_out = run.checkpoints
        elif not run.port_taken:
            break
    if not left_out or not is_measured:
        return run.result
    shown = ", ".join(left_out[:3]) + (f" and {len(left_out) - 3} more" if len(left_out) > 3 else "")
    note = f"ran without {shown} of its folder, since with them the script ended at once"
    return dataclasses.replace(run.result, message="; ".join(filter(None, (run.result.message, note))))


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One run of a trial's script on all ranks."""

    result: TrialResult
    port_taken: bool
    """Whether another program took a port in between."""
    checkpoints: tuple[str, ...]
    """Files of its folder from which it may have resumed; none if it ran in the user's folder itself."""


def _run_once(trial: Trial, command: CommandModel, passed: float, left_out: tuple[str, ...]) -> ScriptRun:
    """Run the script; `passed`: seconds that earlier runs took; `left_out`: files of the user's folder that it does not get."""
    on_cpu = runs_on_cpu(trial.request)
    with trial_folder() as folder:
        began = trial.enter("build")
        placement = gather_placement(trial.context, folder)
        work, way = Path(command.folder), folder_kind(command, placement.nodes)
        if way != "none":
            root = placement.folder.with_name("work")
            if placement.local_rank == 0:
                make_working_folder(work, root, way, left_out)
            work = working_path(work, root)
        starts = placement.local_rank == 0 and way != "none"
        before = file_states(work) if starts else {}
        # No script starts before the folder of its host is complete.
        rows = gather_plain(trial.context, {"passed": passed, "checkpoints": checkpoints_in(work) if starts else []})
        passed, checkpoints = max(row["passed"] for row in rows), rows[0]["checkpoints"]
        launch = make_launch(trial, command, placement, folder, work if way != "none" else None, on_cpu)
        watch = ScriptWatch(trial, command, launch, folder, on_cpu)
        try:
            end = _watch_until_end(trial, command, watch, began, passed)
            began = trial.enter("close")
            _end(watch, end)
        finally:
            watch.close()
            remove_shared_memory(placement.address, placement.port)
        written = sorted(name for name, state in file_states(work).items() if before.get(name) != state) if starts else []
        facts = facts_of(watch, trial.context.rank, failure_table(trial.request.failures))
        rows = gather_plain(trial.context, {**facts, "written": written})
        shutil.rmtree(placement.folder.parent, ignore_errors=True)  # on other hosts than rank 0's too
        trial.leave(began)
    result = result_of(trial, end.value, rows, launch.words)
    return ScriptRun(result, any(row["port_taken"] for row in rows), tuple(checkpoints))


def runs_on_cpu(request: TrialRequest) -> bool:
    """Whether the script runs on CPUs only. The job's device kind decides, because the script may use another torch."""
    return request.device_kind == "cpu" if request.device_kind is not None else not torch.cuda.is_available()


def conclude(rows: list[RankUpdate], waited: float, first_report: float, limit: float) -> ScriptEnd | None:
    """Why the trial is over, from the state of every rank; None: it goes on.

    `waited`: seconds since the first rank had failed or was measured.

    1. A rank's script has failed, and the grace period is over, in which others may report the cause, or none runs any more.
    2. One has been timed for long enough; this holds for all that train in lockstep. One with hardly a step is waited for.
    3. All have ended by themselves.
    4. None has reported anything within `first_report` seconds, and one is busy: it does not report at all.
    5. The time is over.
    """
    states = [State(int(row.state)) for row in rows]
    elapsed = max(row.elapsed for row in rows)
    if any(state in FAILURES for state in states):
        running = any(state in (State.RUNNING, State.ENOUGH) for state in states)
        at_once = any(state in FAILURES and state is not State.BROKEN for state in states)
        return None if running and not at_once and waited < GRACE_SECONDS else ScriptEnd.FAILED
    if all(state is State.ENDED for state in states):
        return ScriptEnd.MEASURED
    if State.ENOUGH in states:
        steps = [row.observed for row, state in zip(rows, states, strict=True) if state is not State.ENDED]
        is_apart = min(steps) < FEWEST_STEPS <= max(steps)
        return None if is_apart and waited < APART_SECONDS and elapsed <= limit else ScriptEnd.MEASURED
    if elapsed > first_report and not any(row.reports for row in rows) and any(row.busy for row in rows):
        return ScriptEnd.SILENT
    return ScriptEnd.HANGING if elapsed > limit else None


def _watch_until_end(trial: Trial, command: CommandModel, watch: ScriptWatch, began: float, passed: float) -> ScriptEnd:
    """Look at the script and exchange states until the trial is over, of whose time `passed` seconds are."""
    timeout = trial.request.timeout_seconds
    # Before the ranks themselves are killed.
    limit = timeout - min(0.02 * timeout + 1.0 + ABORT_SECONDS, timeout / 2) - passed
    first_report = min(command.report_seconds or timeout / 2, limit)
    settled_at: dict[bool, float] = {}  # whether a rank has failed, or one was measured -> when
    while True:
        rows = _gather_rows(trial, watch, first_report)
        elapsed = max(row.elapsed for row in rows)  # of all ranks, so that all conclude in the same iteration
        has_failed = any(State(int(row.state)) in FAILURES for row in rows)
        waited = 0.0
        if has_failed or any(row.state == State.ENOUGH for row in rows):
            waited = elapsed - settled_at.setdefault(has_failed, elapsed)
        phase = ("build", "warmup", "measure")[int(max(row.phase for row in rows))]
        if phase != trial.phase:
            trial.leave(began)
            began = trial.enter(phase)
        trial.step = int(max(row.reports for row in rows))
        trial.report_progress(max(row.rate for row in rows) or None)
        if (end := conclude(rows, waited, first_report, limit)) is not None:
            trial.leave(began)
            return end
        time.sleep(TICK_SECONDS)


def _gather_rows(trial: Trial, watch: ScriptWatch, first_report: float) -> list[RankUpdate]:
    """Look at this rank's script; return the rows of all ranks."""
    state = watch.look()
    elapsed, silent = watch.elapsed, not watch.step_count
    if silent and elapsed > first_report / 2:
        watch.record_activity()
    mine = RankUpdate(
        state=float(state),
        reports=float(watch.step_count),
        elapsed=elapsed,
        busy=float(silent and elapsed > first_report and watch.is_busy()),
        phase=2.0 if watch.steps.measuring else float(not silent),
        rate=watch.steps.latest_rate,
        observed=math.inf if watch.work.timed.problem else float(len(watch.work.timed.steps)),
    )
    names = [item.name for item in dataclasses.fields(RankUpdate)]
    rows = gather_numbers(trial.context, [getattr(mine, name) for name in names])
    return [RankUpdate(**dict(zip(names, row, strict=True))) for row in rows]


def _end(watch: ScriptWatch, end: ScriptEnd) -> None:
    if end is ScriptEnd.MEASURED:
        watch.look_at_memory()
    if end is ScriptEnd.HANGING:
        watch.process.signal(b"a")
        time.sleep(ABORT_SECONDS)
    watch.close()
