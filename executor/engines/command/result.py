"""Makes the result of a script's trial from the facts of every rank, with the cause of a failure from its output."""

import builtins
import dataclasses
import itertools
import re
import shlex
import signal
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from executor.engines.command.agreement import (
    Work,
    are_uneven,
    batch_text,
    disagreement,
    mean_samples_of_step,
    ranks_with_own_samples,
    training_ranks,
    unseen_text,
    work_text,
)
from executor.engines.command.steps import FEWEST_TIMED, SlowSteps
from executor.engines.command.watch import FAILURES, ScriptWatch, State
from executor.errors import failure_table
from executor.measurement.device import environment
from executor.measurement.flops import convention_of, flops_utilization, tflops_per_device
from executor.measurement.timing import step_time
from executor.measurement.trial_report import Trial, rate_of
from search_spaces.failure import Evidence, FailureTable, Sign
from search_spaces.models.command import STEP_TIMES, CommandModel
from search_spaces.outcome import Outcome
from search_spaces.patterns import compiled
from search_spaces.placeholders import ACCUMULATION_PLACEHOLDERS, names_in, samples_of_step, waiting_text
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Interval, RankMeasurement, StepProfile, TrialRequest, TrialResult

SHORTEST_CLOCK = 1.0
"""Seconds of log lines from which their times are compared with the clock: a rank reads them ten times a second."""
LOSS_FACTOR = 1.5
"""Factor between first losses of a script's trials from which they are named."""
REMEDY = "call autotune.report(samples=…) after every optimizer step, or give --pattern for its log"

Facts = dict[str, Any]
"""What a rank knows about its script, as plain data."""


def facts_of(watch: ScriptWatch, rank: int, table: FailureTable) -> Facts:
    """What this rank sends to the others when its script has ended."""
    ended, readings = watch.process.exit, watch.readings
    failure = read_failure(watch.output.tail)
    evidence = failure.evidence(None if ended is None else ended.code, watch.killed_for_memory)
    row, _ = table.find(Evidence(exceptions=("MemoryLimitError",)) if watch.state is State.OVER else evidence)
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
        "compiler": watch.tree.compiler,
        "last_line": watch.output.tail.replace("\r", "\n").strip().rpartition("\n")[2],
        "cause": row.name,
        "killed_for_memory": watch.killed_for_memory,
        "port_taken": watch.state is State.BROKEN and failure.port_taken,
        "report_problem": readings.not_finite or readings.problem,
        "reports": watch.step_count,
        "works": watch.work.summaries(readings.reported_at),
        "reported_seconds": watch.reported_seconds,
        "times_observed_work": watch.times_observed_work,
        "samples": next(iter(readings.reported_samples.most_common(1)), (None, 0))[0],
        "log_seconds": readings.log_seconds,
        "log_clock": readings.log_clock,
        "losses": readings.losses[:3],
        "seconds": [step.seconds for step in timed],
        "timed_samples": [step.samples for step in timed],
        "left_out": watch.left_out,
        "slow": to_plain(watch.steps.slow),
        "lost": watch.steps.lost,
        "waited": statistics.fmean(waited) if waited else None,
        "settled": watch.steps.settled,
        "peak": watch.peak_bytes,
        "resident": watch.tree.peak_bytes,
        "reserved": readings.reserved_bytes,
        "cpu": watch.tree.cpu_seconds / max(readings.count, 1),
        "profile": to_plain(watch.work.step_profile(watch.profiled_steps)),
    }


def result_of(trial: Trial, end: str, rows: Sequence[Facts], words: Sequence[str]) -> TrialResult:
    """The trial's result, the same on every rank. `end`: a value of `trial.ScriptEnd`."""
    if any(State(row["state"]) in FAILURES for row in rows):
        return _failed(trial, rows)
    if end == "hanging":
        return _hanging(trial, rows)
    if end == "silent":
        seconds = trial.phase_seconds.get("build", 0.0)
        printed = max(rows, key=lambda row: len(row["last_line"]))
        compiler = next((row["compiler"] for row in rows if row["compiler"]), "")
        compiles = f"it still compiles extensions ({compiler}): give it time with --report-seconds and --trial-timeout"
        remedy = compiles if compiler else _remedy(trial, printed)
        message = f"the script runs but has reported no steps within {seconds:.0f} s; {remedy}"
        return _without_timing(trial, Outcome.FAILED, message, printed["text"])
    timed = max(rows, key=lambda row: (State(row["state"]) is State.ENOUGH, len(row["seconds"]), -row["rank"]))
    if len(timed["seconds"]) < FEWEST_TIMED:
        return _not_measured(trial, timed)
    return _measured(trial, timed, rows, words)


def _remedy(trial: Trial, row: Facts) -> str:
    """What to do where a script reported nothing."""
    command = trial.request.model
    if not isinstance(command, CommandModel) or command.pattern is None:
        return "; ".join(filter(None, (REMEDY, unseen_text(row["works"]))))
    last = row["last_line"]
    return "--pattern matches nothing in its output" + (f", which ends with {last[-160:]!r}" if last else ", which is empty")


def _not_measured(trial: Trial, timed: Facts) -> TrialResult:
    """A script that ended by itself before its steps could be timed. That is no failure of its configuration's speed."""
    if timed["reports"]:
        message = f"the script exited with code 0 after {timed['reports']} reports, too few to time; let it run for 20 steps"
    else:
        message = f"the script exited with code 0 without a measurement; {_remedy(trial, timed)}"
    if trial.request.command_has_reported:
        message = (
            f"{message.partition(';')[0]}, though other trials of this command reported steps: it may have continued from "
            "files of an earlier trial; let it write them to {trial_folder}, or use --trial-folder link"
        )
    row, _ = failure_table(trial.request.failures).find(Evidence(signs=(Sign.NOT_MEASURED,)))
    return dataclasses.replace(_without_timing(trial, row.outcome, message, timed["text"]), cause=row.name)


def _failed(trial: Trial, rows: Sequence[Facts]) -> TrialResult:
    """Report the cause, not its consequences: out of memory before an error, an error before a broken collective."""
    table = failure_table(trial.request.failures)
    failures = [row for row in rows if State(row["state"]) in FAILURES]
    cause = min(failures, key=lambda row: _order(row, table))
    failure = table.row(cause["cause"])
    assert failure is not None
    failed_rank, state = f"rank {cause['rank']}", State(cause["state"])
    if state is State.OVER:
        limit = trial.request.memory_limit_bytes or 0
        message = (
            f"{failed_rank} holds {cause['peak']:,} bytes, the limit is {limit:,}; "
            "use a smaller micro-batch, a higher ZeRO stage or activation checkpointing"
        )
        return _without_timing(trial, failure.outcome, message, None, rows, cause)
    if state is State.WRONG:
        return _without_timing(trial, Outcome.WRONG, cause["report_problem"], None, rows)
    if state is State.MISUSED:
        return _without_timing(
            trial, Outcome.FAILED, f"{failed_rank}: {cause['report_problem']}; {REMEDY}", cause["text"], rows
        )
    if cause["problem"]:
        return _without_timing(trial, Outcome.FAILED, f"{failed_rank}: {cause['problem']}", cause["text"], rows)
    how = ": ".join(filter(None, [f"the script {_exit_text(cause['exit'])}", cause["line"]]))
    message = f"{failed_rank}: {how}"
    if failure.outcome is Outcome.INFEASIBLE:
        message = f"{failed_rank}: the kernel killed the script: out of memory" if cause["killed_for_memory"] else cause["line"]
    elif failure.signals and failure.outcome in (Outcome.LOST, Outcome.PREEMPTED):
        message = f"{failed_rank}: the script was killed from outside"
    return _without_timing(trial, failure.outcome, message, cause["text"], rows, cause)


def _order(row: Facts, table: FailureTable) -> tuple[int, int]:
    failure = table.row(row["cause"])
    if State(row["state"]) is not State.BROKEN or (failure is not None and failure.outcome is Outcome.INFEASIBLE):
        return 0, row["rank"]
    return 2 if failure is not None and failure.consequence else 1, row["rank"]


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was terminated by {signal.Signals(-code).name}"
    except ValueError:
        return f"was terminated by signal {-code}"


def _hanging(trial: Trial, rows: Sequence[Facts]) -> TrialResult:
    """A trial that ran out of time, with the stack traces of each rank as Python's fault handler printed them."""
    reports = max(row["reports"] for row in rows)
    progress = f"no further report after {reports} reports" if reports else "no report was received"
    message = f"no result within {trial.request.timeout_seconds:g} s ({progress}); the script was killed on every rank"
    text = "\n".join(f"rank {row['rank']}:\n{_stack_traces(row['text'])}" for row in rows if row["text"])
    row, _ = failure_table(trial.request.failures).find(Evidence(signs=(Sign.TIME_LIMIT,)))
    return dataclasses.replace(_without_timing(trial, row.outcome, message, text), cause=row.name)


def _without_timing(
    trial: Trial, outcome: Outcome, message: str, text: str | None, rows: Sequence[Facts] = (), cause: Facts | None = None
) -> TrialResult:
    """The result of a trial without a measurement; `cause`: facts of the rank whose failure is in the failure table."""
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


def _measured(trial: Trial, timed: Facts, rows: Sequence[Facts], words: Sequence[str]) -> TrialResult:
    request, works = trial.request, _works(rows)
    if problem := disagreement(request, works, timed):
        return _without_timing(trial, Outcome.WRONG, problem, None, rows)
    seconds = timed["seconds"]
    if timed["times_observed_work"] and timed["works"][0]["certain"]:
        seconds = _seconds_of_all_ranks(request, timed, works)
    timing = step_time(seconds)
    lost = trial.race.interval(seconds) if timed["lost"] and trial.race is not None else None
    rate = lost or rate_of(timing, request.workload.global_batch_size)
    tflops = tflops_per_device(request.model, request.workload, rate.mean, request.world_size)
    return TrialResult(
        attempt=request.attempt,
        outcome=Outcome.PRUNED if lost else Outcome.OK,
        message=_message(trial, timed, rows, lost),
        losses=tuple(timed["losses"]),
        step_seconds=tuple(seconds),
        samples_per_second=rate,
        within_relative_error=timing.relative_error,
        warmup_steps=timed["slow"]["start"] if timed["settled"] else None,
        peak_memory_bytes=max(row["peak"] for row in rows) or None,
        ranks=tuple(map(_rank, rows)),
        tflops_per_device=tflops,
        mfu=flops_utilization(tflops, request.peak_flops_per_device),
        flops_convention=convention_of(request.model),
        unstable=lost is None and not timed["settled"],
        phase_seconds=dict(trial.phase_seconds),
        environment={
            **environment(trial.context.device),
            "command": shlex.join(words),
            "observed_work": work_text(request, works),
            "process_group": str(timed["works"][0].get("group", "")),
            "written": ", ".join(itertools.chain.from_iterable(row["written"] for row in rows)),
        },
    )


def _seconds_of_all_ranks(request: TrialRequest, timed: Facts, works: Sequence[Work]) -> list[float]:
    """The timed steps, which counted one rank's samples for each rank until those of all were compared.

    Ranks of tensor parallelism share their samples, and some ranks take no steps. Where numbers of samples differ, the total
    time counts for the total of samples.
    """
    training, counted = training_ranks(works), request.config.data_parallel_size(len(works))
    work, seconds, samples = timed["works"][0], timed["seconds"], timed["timed_samples"]
    if not are_uneven(training) or not work["mean_samples"]:
        return [each * counted / ranks_with_own_samples(request, training) for each in seconds]
    mean = statistics.fmean(samples) * mean_samples_of_step(request, training) / (work["mean_samples"] * counted)
    return [each * count / mean for each, count in zip(seconds, samples, strict=True)]


def _message(trial: Trial, timed: Facts, rows: Sequence[Facts], lost: Interval | None) -> str:
    parts = []
    if lost is not None and trial.race is not None:
        steps = f"after {len(timed['seconds'])} timed steps"
        parts.append(f"ended {steps}: at most {lost.high:.4g} samples/s, and the best has {trial.race.rate_to_beat:.4g}")
    elif not timed["settled"]:
        ended = State(timed["state"]) is State.ENDED
        why = (
            "the script ended before its steps settled" if ended else "step times still drifted when the allowed warm-up ended"
        )
        parts.append(f"unstable: {why}")
    works = _works(rows)
    unseen = unseen_text(works)
    waits = [row["waited"] / statistics.fmean(row["seconds"]) for row in rows if row["waited"] and row["seconds"]]
    parts += filter(
        None,
        (
            waiting_text(max(waits, default=0.0), trial.request.model),
            _slow_text(timed),
            _left_out_text(timed),
            _clock_text(timed),
            _samples_text(trial, timed) if unseen else "",
            _loss_text(trial, timed),
            "" if trial.request.command_has_reported else batch_text(trial.request, works),
            unseen,
        ),
    )
    return "; ".join(parts)


def _works(rows: Sequence[Facts]) -> list[Work]:
    """What was observed of every rank, those that the script started itself included."""
    return [work for row in rows for work in row["works"]]


def _slow_text(timed: Facts) -> str:
    """What is slow regularly, with the way to leave it out."""
    slow = from_plain(SlowSteps, timed["slow"])
    if not slow.regular:
        return ""
    excess = slow.period * (statistics.fmean(timed["seconds"]) - slow.ordinary)
    return (
        f"1 of {slow.period:.0f} steps takes {excess:.2g} s longer: evaluation, checkpoint or rollout? its time counts; "
        "leave it out with autotune.paused()"
    )


def _left_out_text(timed: Facts) -> str:
    """How much of the time the rate leaves out."""
    count, steps, share = timed["left_out"]
    if share <= 0.05:  # not worth a report
        return ""
    return (
        f"{count} of {steps} steps {'is' if count == 1 else 'are'} left out with {share:.0%} of the time: evaluation, "
        "checkpoint, compilation, or a rollout in evaluation mode"
    )


def _clock_text(timed: Facts) -> str:
    """A warning if the times in a log do not add up to the time in which it was printed."""
    logged, passed = timed["log_seconds"], timed["log_clock"]
    if passed < SHORTEST_CLOCK or 0.8 * passed < logged < 1.25 * passed:
        return ""
    return (
        f"the times in the log add up to {logged:.3g} s, but its lines were printed in {passed:.3g} s: check the unit, and "
        "whether they are of a step (step_seconds) or of a micro-batch (micro_batch_seconds), unless the log leaves steps out"
    )


def _loss_text(trial: Trial, timed: Facts) -> str:
    """A warning if the first loss is far from that of the job's first trial. Seeds and samples are the script's own."""
    references, losses = trial.request.reference_losses[:1], timed["losses"][:1]
    for reference, loss in zip(references, losses, strict=False):
        if max(abs(reference), abs(loss)) > LOSS_FACTOR * min(abs(reference), abs(loss)):
            return (
                f"its first loss is {loss:.4g}, and {reference:.4g} in another trial: it may train something else, or report a "
                "loss that depends on the number of micro-batches"
            )
    return ""


def _samples_text(trial: Trial, timed: Facts) -> str:
    """What the rate assumes of a step whose work nobody observed: the samples that the command states, or that reports have."""
    request, command, batch = trial.request, trial.request.model, trial.request.workload.global_batch_size
    if not isinstance(command, CommandModel) or timed["samples"] == batch:
        return ""
    if timed["samples"] is None:
        if command.pattern is None or not compiled(command.pattern).groups.intersection(STEP_TIMES):
            return ""
        samples = samples_of_step(command, request.config, request.workload, request.world_size)
        return f"a step in the log counts {samples} samples; if that is wrong, read them with a group `samples` or `tokens`"
    # Placeholders from which a script knows the batch size.
    batch_placeholders = ACCUMULATION_PLACEHOLDERS | {"micro_batch_size"}
    if not batch_placeholders & set(names_in(command)):
        return ""
    if timed["samples"] % batch == 0 and command.pattern is None:
        return ""  # it reports once per several steps
    matches_batch = timed["samples"] * request.world_size == batch
    remedy = (
        "report those of all ranks, which must train together" if matches_batch else "pass it {gradient_accumulation_steps}"
    )
    return f"reports {timed['samples']:g} samples at a time, and the global batch is {batch}: {remedy}"


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
        profile=from_plain(StepProfile, row["profile"]) if row["profile"] else None,
    )


_TRACEBACK = "Traceback (most recent call last):"
_ERROR_LINE = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Iteration)|[A-Za-z_]\w*\.[\w.]+)(?::|$)"
)
"""The last line of a traceback: the name of a class, with or without its package."""
_PROGRESS = re.compile(r"^\s*\d+%\|")
"""A progress bar, which is redrawn on one line."""
MOST_LINES = 60
"""Lines of output that are shown if it contains no traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFailure:
    """The cause of a script's failure, according to its output."""

    line: str
    """The error in one line; empty: the script printed nothing."""
    text: str
    """Its traceback, or the last lines of the output."""
    port_taken: bool
    """Whether another program took the port that was chosen for the script."""
    raised: bool
    """Whether `text` is a traceback."""

    def evidence(self, exit_code: int | None, killed_for_memory: bool) -> Evidence:
        """The evidence to look up in the failure table."""
        return Evidence(
            exceptions=_classes(self.line) if self.raised else (),
            exit_code=exit_code,
            signs=(Sign.OOM_KILL,) if killed_for_memory else (),
            message=self.line,
            traceback=self.text if self.raised else "",
            output=self.text,
        )


def read_failure(tail: str) -> ScriptFailure:
    """Find the failure in the end of the output."""
    # torch prefixes the lines of an uncaught error with the rank. A traceback may begin where a progress bar ended.
    plain = re.sub(r"\[rank\d+\]:\s?", "", tail).replace("\r", "\n").replace(_TRACEBACK, f"\n{_TRACEBACK}")
    text, line = _last_traceback(plain)
    port_taken = re.search(r"EADDRINUSE|[Aa]ddress already in use", text) is not None
    return ScriptFailure(line=line, text=text, port_taken=port_taken, raised=_TRACEBACK in text)


def _stack_traces(text: str) -> str:
    """The stack traces that Python's fault handler printed, without its lines about the interpreter."""
    about = ("Fatal Python error: Aborted", "Extension modules: ", "Current thread's C stack trace", "Python runtime state")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(about)]
    return "\n".join(re.sub(r"^(Current thread|Thread) 0x[0-9a-f]+ ", r"\1 ", line) for line in lines)


def _last_traceback(output: str) -> tuple[str, str]:
    """The last error with the errors that it is chained to, and its own line."""
    lines = output.splitlines()
    starts = [at for at, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        shown = [line for line in lines if not _PROGRESS.match(line)][-MOST_LINES:]
        return "\n".join(shown), next((line.strip() for line in reversed(shown) if line.strip()), "")
    end = next((at for at in range(starts[-1] + 1, len(lines)) if _ERROR_LINE.match(lines[at])), len(lines) - 1)
    # An error's message may have several lines; the class name is on the first.
    first = _first_of_chain(lines, starts)
    shown = [line for line in lines[first : end + 1 + MOST_LINES] if not _PROGRESS.match(line)]
    return "\n".join(shown), lines[end].strip()


def _first_of_chain(lines: list[str], starts: list[int]) -> int:
    """Line index of the first traceback that Python chains to the last one."""
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = " ".join(lines[start:first])
        if "During handling of the above exception" not in between and "direct cause of the following" not in between:
            break
        first = start
    return first


def _classes(line: str) -> tuple[str, ...]:
    """The class named in a traceback's last line and, if it is a builtin, its base classes."""
    name = line.partition(":")[0].strip().rpartition(".")[2]
    kind = getattr(builtins, name, None)
    bases = kind.__mro__ if isinstance(kind, type) and issubclass(kind, BaseException) else (BaseException,)
    return tuple(dict.fromkeys((name, *(base.__name__ for base in bases))))
