"""The result of a script's trial, from what every rank knows of its own script."""

import dataclasses
import shlex
import signal
import socket
import statistics
from collections.abc import Sequence
from typing import Any

from executor.engines.command.failures import read_failure, without_handler_words
from executor.engines.command.stopwatch import FEWEST_TIMED
from executor.engines.command.watch import FAILURES, State, Watch
from executor.failures import failure_table
from executor.measurement.environment import environment
from executor.measurement.flops import convention_of, flops_utilization, tflops_per_device
from executor.measurement.timing import step_time
from executor.measurement.trial_report import rate_of
from executor.measurement.trial_state import Trial
from search_spaces.command import CommandModel
from search_spaces.failure import Evidence, FailureTable, Sign
from search_spaces.model import Model
from search_spaces.outcome import Outcome
from search_spaces.placeholders import TELLS_BATCH, names_in
from search_spaces.trial import Interval, RankMeasurement, TrialResult
from search_spaces.waiting import waiting_text

KEPT_LOSSES = 3
REMEDY = "call autotune.report(samples=…) after every optimizer step, or give --pattern for its log"
_TAKEN_FROM_OUTSIDE = (Outcome.LOST, Outcome.PREEMPTED)

_LIMIT = Evidence(exceptions=("MemoryLimitError",))
"""Of a script that holds more than a rank may."""
Facts = dict[str, Any]
"""What a rank knows of its script, as plain data."""


def facts_of(watch: Watch, rank: int, table: FailureTable) -> Facts:
    """What this rank tells the others when its script has ended."""
    ended, readings = watch.process.exit, watch.readings
    failure = read_failure(watch.output.tail)
    evidence = failure.evidence(None if ended is None else ended.code, watch.killed_for_memory)
    row, _ = table.find(_LIMIT if watch.state is State.OVER else evidence)
    timed = watch.steps.timed()
    waited = [step.waited for step in timed if step.waited is not None]
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "state": int(watch.state),
        "exit": None if ended is None else ended.code,
        "problem": ended.problem if ended is not None else "",
        "line": row.line_in(failure.line) or row.line_in(failure.text) or failure.line,
        "text": failure.text,
        "cause": row.name,
        "killed_for_memory": watch.killed_for_memory,
        "port_taken": watch.state is State.BROKEN and failure.port_taken,
        "told": readings.not_finite or readings.problem,
        "reports": readings.count,
        "samples": readings.samples,
        "losses": readings.losses[:KEPT_LOSSES],
        "seconds": [step.seconds for step in timed],
        "warm": watch.steps.warm_seconds,
        "hopeless": watch.steps.hopeless,
        "waited": statistics.fmean(waited) if waited else None,
        "settled": watch.steps.settled,
        "peak": watch.peak_bytes,
        "resident": watch.tree.peak_bytes,
        "reserved": readings.reserved_bytes,
        "cpu": watch.tree.cpu_seconds / max(readings.count, 1),
    }


def result_of(trial: Trial, end: str, rows: Sequence[Facts], words: Sequence[str]) -> TrialResult:
    """The same on every rank. `end`: a value of `trial.End`."""
    if any(State(row["state"]) in FAILURES for row in rows):
        return _failed(trial, rows)
    if end == "hanging":
        return _hanging(trial, rows)
    if end == "silent":
        seconds = trial.phase_seconds.get("build", 0.0)
        message = f"the script runs, and has told nothing of its steps within {seconds:.0f} s; {REMEDY}"
        return _ended(trial, Outcome.FAILED, message, rows[0]["text"])
    told = max(rows, key=lambda row: (State(row["state"]) is State.ENOUGH, len(row["seconds"]), -row["rank"]))
    if len(told["seconds"]) < FEWEST_TIMED:
        message = f"the script exited with code 0 without a measurement; {REMEDY}"
        if told["reports"]:
            message = f"the script exited with code 0 after {told['reports']} reports, too few to time; let it run for 20 steps"
        return _ended(trial, Outcome.FAILED, message, told["text"])
    return _measured(trial, told, rows, words)


def _failed(trial: Trial, rows: Sequence[Facts]) -> TrialResult:
    """The cause, and not its consequences: a memory's end before an error, an error before a broken collective."""
    table = failure_table(trial.request.failures)
    failures = [row for row in rows if State(row["state"]) in FAILURES]
    cause = min(failures, key=lambda row: _order(row, table))
    told = table.row(cause["cause"])
    assert told is not None
    where, state = f"rank {cause['rank']}", State(cause["state"])
    if state is State.OVER:
        limit = trial.request.memory_limit_bytes or 0
        message = (
            f"{where} holds {cause['peak']:,} bytes, the limit is {limit:,}; "
            "use a smaller micro-batch, a higher ZeRO stage or activation checkpointing"
        )
        return _ended(trial, told.outcome, message, None, rows, cause)
    if state is State.WRONG:
        return _ended(trial, Outcome.WRONG, cause["told"], None, rows)
    if state is State.MISUSED:
        return _ended(trial, Outcome.FAILED, f"{where}: {cause['told']}; {REMEDY}", cause["text"], rows)
    if cause["problem"]:
        return _ended(trial, Outcome.FAILED, f"{where}: {cause['problem']}", cause["text"], rows)
    how = ": ".join(filter(None, [f"the script {_exit_text(cause['exit'])}", cause["line"]]))
    message = f"{where}: {how}"
    if told.outcome is Outcome.INFEASIBLE:
        message = f"{where}: the kernel killed the script for want of memory" if cause["killed_for_memory"] else cause["line"]
    elif told.signals and told.outcome in _TAKEN_FROM_OUTSIDE:
        message = f"{where}: the script was killed from outside"
    return _ended(trial, told.outcome, message, cause["text"], rows, cause)


def _order(row: Facts, table: FailureTable) -> tuple[int, int]:
    told = table.row(row["cause"])
    if State(row["state"]) is not State.BROKEN or (told is not None and told.outcome is Outcome.INFEASIBLE):
        return 0, row["rank"]
    return 2 if told is not None and told.consequence else 1, row["rank"]


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _hanging(trial: Trial, rows: Sequence[Facts]) -> TrialResult:
    """Where each rank stands, as Python's fault handler printed it."""
    reports = max(row["reports"] for row in rows)
    seen = f"last heard of after {reports} reports" if reports else "nothing was heard of it"
    message = f"no result within {trial.request.timeout_seconds:g} s ({seen}); the script was killed on every rank"
    text = "\n".join(f"rank {row['rank']}:\n{without_handler_words(row['text'])}" for row in rows if row["text"])
    row, _ = failure_table(trial.request.failures).find(Evidence(signs=(Sign.TIME_LIMIT,)))
    return dataclasses.replace(_ended(trial, row.outcome, message, text), cause=row.name)


def _ended(
    trial: Trial, outcome: Outcome, message: str, text: str | None, rows: Sequence[Facts] = (), cause: Facts | None = None
) -> TrialResult:
    """A trial that measured no time; `cause`: the rank whose failure a row of the failure table tells."""
    return TrialResult(
        attempt=trial.request.attempt,
        outcome=outcome,
        message=message,
        traceback=text or None,
        cause=None if cause is None else cause["cause"],
        node=None if cause is None else cause["host"],
        peak_memory_bytes=max((row["peak"] for row in rows), default=0) or None,
        phase_seconds=dict(trial.phase_seconds),
    )


def _measured(trial: Trial, told: Facts, rows: Sequence[Facts], words: Sequence[str]) -> TrialResult:
    request = trial.request
    timing = step_time(told["seconds"])
    lost = _lost(trial, told)
    rate = lost or rate_of(timing, request.workload.global_batch_size)
    tflops = tflops_per_device(request.model, request.workload, rate.mean, request.world_size)
    return TrialResult(
        attempt=request.attempt,
        outcome=Outcome.PRUNED if lost else Outcome.OK,
        message=_message(trial, told, rows, lost),
        losses=tuple(told["losses"]),
        step_seconds=tuple(told["seconds"]),
        samples_per_second=rate,
        within_relative_error=timing.relative_error,
        peak_memory_bytes=max(row["peak"] for row in rows) or None,
        ranks=tuple(map(_rank, rows)),
        tflops_per_device=tflops,
        mfu=flops_utilization(tflops, request.peak_flops_per_device),
        flops_convention=convention_of(request.model),
        unstable=lost is None and not told["settled"],
        phase_seconds=dict(trial.phase_seconds),
        environment={**environment(trial.context.device), "command": shlex.join(words)},
    )


def _lost(trial: Trial, told: Facts) -> Interval | None:
    """The rate by which it lost its race, with its bound; None: it did not."""
    if trial.race is None or State(told["state"]) is not State.ENOUGH:
        return None
    if told["hopeless"]:
        return trial.race.hopeless_interval(told["warm"])
    return trial.race.interval(told["seconds"]) if trial.race.is_lost(told["seconds"]) else None


def _message(trial: Trial, told: Facts, rows: Sequence[Facts], lost: Interval | None) -> str:
    parts = []
    if lost is not None and trial.race is not None:
        steps = "in warm-up" if told["hopeless"] else f"after {len(told['seconds'])} timed steps"
        parts.append(f"ended {steps}: at most {lost.high:.4g} samples/s, and the best has {trial.race.rate_to_beat:.4g}")
    elif not told["settled"]:
        ended = State(told["state"]) is State.ENDED
        why = (
            "the script ended before its steps settled" if ended else "step times still drifted when the allowed warm-up ended"
        )
        parts.append(f"unstable: {why}")
    parts += filter(None, (_wait_text(rows, trial.request.model), _samples_text(trial, told)))
    return "; ".join(parts)


def _wait_text(rows: Sequence[Facts], command: Model) -> str:
    """Of the rank that waits longest."""
    shares = [row["waited"] / statistics.fmean(row["seconds"]) for row in rows if row["waited"] and row["seconds"]]
    return waiting_text(max(shares, default=0.0), command)


def _samples_text(trial: Trial, told: Facts) -> str:
    """Where a report is of other samples than a step has: the rate holds, but the batch is not the one that was asked for."""
    command, batch = trial.request.model, trial.request.workload.global_batch_size
    if told["samples"] is None or told["samples"] == batch or not isinstance(command, CommandModel):
        return ""
    if not TELLS_BATCH & set(names_in(command.arguments)):
        return ""
    if told["samples"] % batch == 0:
        return ""  # it reports every so many steps
    own = told["samples"] * trial.request.world_size == batch
    remedy = "report those of all ranks, which must train together" if own else "tell the script {gradient_accumulation_steps}"
    return f"reports {told['samples']:g} samples at a time, and the global batch is {batch}: {remedy}"


def _rank(row: Facts) -> RankMeasurement:
    return RankMeasurement(
        rank=row["rank"],
        host=row["host"],
        peak_memory_bytes=row["peak"],
        memory_by_tag={},
        tag_peak_bytes={},
        rss_peak_bytes=row["resident"],
        cpu_seconds_per_step=row["cpu"],
        collectives=(),
        reserved_bytes=row["reserved"],
        data_wait_seconds=row["waited"],
    )
