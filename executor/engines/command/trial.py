"""One trial of a user's script: start it on every rank, watch it, agree on its end, tell what came of it."""

import dataclasses
import time
from dataclasses import dataclass
from enum import StrEnum

import torch

from executor.engines.command.launch import agreed_place, launch_of, trial_folder
from executor.engines.command.result import facts_of, result_of
from executor.engines.command.watch import FAILURES, State, Watch
from executor.engines.leftovers import remove_shared_memory
from executor.errors import EngineRefusalError
from executor.failures import failure_table
from executor.measurement.agreement import gather_numbers, gather_plain
from executor.measurement.trial_state import Trial
from search_spaces.command import CommandModel
from search_spaces.trial import TrialRequest, TrialResult

TICK_SECONDS = 0.1
"""How often ranks look at their scripts and tell each other."""
TERM_SECONDS = 1.0
"""Time for a script whose steps were timed to end by itself."""
ABORT_SECONDS = 0.5
"""Time for a script that hangs to print where."""
GRACE_SECONDS = 1.0
"""How long after the first failure the other ranks are heard: the cause may come after its consequences."""
PORTS = 3
"""Ports that are tried for a script's own process group, should another program take one in between."""
_PHASES = ("build", "warmup", "measure")


class End(StrEnum):
    """Why a trial of a script is over."""

    MEASURED = "measured"
    """Its steps were timed, or it has ended by itself."""
    FAILED = "failed"
    """A rank's script is in one of `FAILURES`."""
    SILENT = "silent"
    """It runs, and has told nothing in the time that it is given."""
    HANGING = "hanging"
    """The trial's time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a rank tells the others after every look: numbers alone, since it is told ten times a second."""

    state: float
    reports: float
    elapsed: float
    busy: float
    phase: float
    rate: float


def run_script(trial: Trial) -> TrialResult:
    """Run the user's command on every rank; every rank of the gang calls it, and gets the same result.

    1. Fill in the command and write the files that it reads; agree on a port; start the script as its launcher would.
    2. Look at it ten times a second (`Watch`): reports, output, memory, its end. Tell the other ranks.
    3. All ranks come to the same conclusion from the same rows (`conclude`), so that no error has to be raised: the ranks stay
       warm, whatever becomes of the script.
    4. End the scripts: those that hang are made to print where first.
    5. Gather what each rank knows, and make one result of it (`result_of`).

    Raises:
        EngineRefusalError: the request has no command.
    """
    command = trial.request.model
    if not isinstance(command, CommandModel):
        raise EngineRefusalError("command-model", "the command engine runs a command; write it after --")
    for _ in range(PORTS):
        result, port_taken = _run_once(trial, command)
        if not port_taken:
            break
    return result


def _run_once(trial: Trial, command: CommandModel) -> tuple[TrialResult, bool]:
    on_cpu = runs_on_cpu(trial.request)
    with trial_folder() as folder:
        began = trial.enter("build")
        place = agreed_place(trial.context)
        launch = launch_of(trial, command, place, folder, on_cpu)
        watch = Watch(trial, command, launch, folder, on_cpu)
        try:
            end = _watched(trial, command, watch, began)
            began = trial.enter("close")
            _end(watch, end)
        finally:
            watch.close(0.0)
            remove_shared_memory(place.address, place.port)
        rows = gather_plain(trial.context, facts_of(watch, trial.context.rank, failure_table(trial.request.failures)))
        trial.leave(began)
    return result_of(trial, end.value, rows, launch.words), any(row["port_taken"] for row in rows)


def runs_on_cpu(request: TrialRequest) -> bool:
    """Whether the script has processors alone. What the job is for decides: the script may have a torch of its own."""
    return request.device_kind == "cpu" if request.device_kind is not None else not torch.cuda.is_available()


def conclude(rows: list[Row], waited: float, first_report: float, limit: float) -> End | None:
    """Why the trial is over, from what every rank told; None: it goes on.

    1. A rank's script has failed: after a grace, in which the others may tell the cause, or when none runs any more.
    2. One has been timed for long enough: so have all, since they train in step.
    3. All have ended by themselves.
    4. None has told anything in `first_report` seconds, and one does something all the time: it will never tell.
    5. The time is over.
    """
    states = [State(int(row.state)) for row in rows]
    elapsed = max(row.elapsed for row in rows)
    if any(state in FAILURES for state in states):
        running = any(state in (State.RUNNING, State.ENOUGH) for state in states)
        at_once = any(state in FAILURES and state is not State.BROKEN for state in states)
        return None if running and not at_once and waited < GRACE_SECONDS else End.FAILED
    if State.ENOUGH in states or all(state is State.ENDED for state in states):
        return End.MEASURED
    if elapsed > first_report and not any(row.reports for row in rows) and any(row.busy for row in rows):
        return End.SILENT
    return End.HANGING if elapsed > limit else None


def _watched(trial: Trial, command: CommandModel, watch: Watch, began: float) -> End:
    """Look and tell until the trial is over."""
    timeout = trial.request.timeout_seconds
    limit = timeout - min(0.02 * timeout + 1.0 + ABORT_SECONDS, timeout / 2)  # before the ranks themselves are killed for it
    first_report = min(command.report_seconds or timeout / 2, limit)
    failed_at: float | None = None
    while True:
        rows = _told(trial, watch, first_report)
        if failed_at is None and any(State(int(row.state)) in FAILURES for row in rows):
            failed_at = max(row.elapsed for row in rows)
        # By the same clocks on every rank, so that all conclude in the same turn.
        waited = 0.0 if failed_at is None else max(row.elapsed for row in rows) - failed_at
        phase = _PHASES[int(max(row.phase for row in rows))]
        if phase != trial.phase:
            trial.leave(began)
            began = trial.enter(phase)
        trial.step = int(max(row.reports for row in rows))
        trial.tell(max(row.rate for row in rows) or None)
        if (end := conclude(rows, waited, first_report, limit)) is not None:
            trial.leave(began)
            return end
        time.sleep(TICK_SECONDS)


def _told(trial: Trial, watch: Watch, first_report: float) -> list[Row]:
    """What every rank sees, on every rank."""
    state = watch.look()
    elapsed, silent = watch.elapsed, not watch.readings.count
    if silent and elapsed > first_report / 2:
        watch.note_half()
    mine = Row(
        state=float(state),
        reports=float(watch.readings.count),
        elapsed=elapsed,
        busy=float(silent and elapsed > first_report and watch.is_busy()),
        phase=2.0 if watch.steps.measuring else float(not silent),
        rate=watch.steps.latest_rate,
    )
    names = [item.name for item in dataclasses.fields(Row)]
    rows = gather_numbers(trial.context, [getattr(mine, name) for name in names])
    return [Row(**dict(zip(names, row, strict=True))) for row in rows]


def _end(watch: Watch, end: End) -> None:
    if end is End.MEASURED:
        watch.look_at_memory()
    if end is End.HANGING:
        watch.process.signal(b"a")
        time.sleep(ABORT_SECONDS)
    watch.close(TERM_SECONDS if end is End.MEASURED else 0.0)
