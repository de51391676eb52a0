"""What failures mean: classifies an exception in a rank, and decides the result of a trial from the reports of its ranks."""

import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.errors import EngineRefusalError, ExecutorError, FactoryError, WrongResultError, failure_table, one_line
from executor.runners.transport import Death, Message, MessageKind
from search_spaces.clusters.microbenchmark import MicrobenchmarkResult
from search_spaces.failure import Evidence, FailureRow, FailureTable, Sign
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain
from search_spaces.trial import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A classified exception."""

    outcome: Outcome
    message: str
    """One line."""
    rule: str | None = None
    traceback: str | None = None
    collective: bool = False
    """Whether this looks like the consequence of another rank's failure. In that case the other failure is reported."""
    cause: str | None = None
    """Name of the row of the failure table; None: a rule or the measurement itself decided."""
    retire: bool = False
    """Whether the rank processes may be unusable for further trials."""


def classify(
    error: BaseException, table: FailureTable | None = None, signs_of: Callable[[str], Sequence[Sign]] | None = None
) -> Failure:
    """Classify `error` and its chain of causes by the failure table.

    A refusal and a wrong result are not failures, so no row describes them. Our own errors say everything in their message;
    only the errors that they wrap have a traceback. `signs_of` returns further signs for an error with this message.
    """
    if isinstance(error, EngineRefusalError):
        return Failure(outcome=Outcome.INVALID, message=error.message, rule=error.rule)
    if isinstance(error, WrongResultError):
        return Failure(outcome=Outcome.WRONG, message=one_line(error))
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    pieces = [_evidence(cause, tuple(signs_of(str(cause))) if signs_of else ()) for cause in causes]
    row, piece = (table or failure_table()).find(*pieces)
    # Report an INFEASIBLE trial with the allocator's message, wherever it was raised; any other with the outermost error.
    reported = causes[pieces.index(piece)] if row.outcome is Outcome.INFEASIBLE else error
    is_own_error = isinstance(error, ExecutorError) and error.__cause__ is None
    return Failure(
        outcome=row.outcome,
        message=one_line(reported),
        traceback=None if is_own_error or row.outcome is Outcome.INFEASIBLE else real_traceback(error),
        collective=row.consequence,
        cause=row.name,
        retire=row.retire,
    )


def real_traceback(error: BaseException) -> str:
    """Return the part of the traceback behind our own frames; if our error wraps the user's, the traceback of the user's."""
    if isinstance(error, FactoryError) and error.__cause__ is not None:
        error = error.__cause__
    shown = traceback.TracebackException.from_exception(error)
    theirs = next((at for at, frame in enumerate(shown.stack) if not _is_ours(frame.filename)), 0)
    if theirs == 0 and isinstance(error, SyntaxError):
        return "".join(shown.format_exception_only())  # it has no user frame, and names the location itself
    shown.stack = traceback.StackSummary.from_list(list(shown.stack)[theirs:])
    return "".join(shown.format())


def _is_ours(filename: str) -> bool:
    root = Path(__file__).resolve().parents[2]
    ours = (f"{root / 'executor'}/", f"{root / 'search_spaces'}/", "<frozen importlib")
    return filename.startswith(ours) or "/importlib/" in filename


def _evidence(error: BaseException, signs: tuple[Sign, ...]) -> Evidence:
    return Evidence(
        exceptions=tuple(kind.__name__ for kind in type(error).__mro__),
        signs=signs,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_tb(error.__traceback__)),
    )


Report = Message | Death
"""How a rank's part of a trial ended: a `result` or `failure` message, or its death."""

CLEAN = (Outcome.INVALID, Outcome.INFEASIBLE, Outcome.WRONG)
"""Outcomes after which the rank processes can serve the next trial, if every rank reported the same one, or a consequence."""
GRACE_SECONDS = 0.5
"""How long further reports are awaited after the first failure: the cause may arrive after its consequences."""
CONSEQUENCE_GRACE_SECONDS = 5.0
"""The same while all reports are consequences: under load their cause may be reported seconds later."""
CLEAN_GRACE_SECONDS = 2.0
"""The same if the failure is clean: keeping the gang saves more time than this."""
_CONSEQUENCE = 2
"""The order of a failure that is the consequence of another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialVerdict:
    """The result of a trial and what to do with its ranks."""

    result: TrialResult
    keep: bool
    """Whether the rank processes can serve the next trial."""
    rank: int | None = None
    """The rank whose failure is reported; None: no failure."""
    rejoin: bool = False
    """Whether they need a new process group first: the old one may contain unfinished collectives of the failed trial."""


def judge(
    attempt: str, reports: Mapping[int, Report], world_size: int, waited: float, table: FailureTable | None = None
) -> TrialVerdict | None:
    """Decide, or return None to wait for the other ranks first.

    1. Without a failure: return rank 0's result when every rank has reported its own.
    2. With a failure: report the cause when every rank has reported, or when `waited` seconds since the first failure exceed
       the grace period. A death takes precedence over an error, because it makes the other ranks fail, with any message. Both
       take precedence over what the failure table calls a consequence (a broken collective, an abort by its watchdog). Among
       equals the first to arrive counts.
    """
    table = table or failure_table()
    failures = [(rank, report) for rank, report in reports.items() if not _is_result(report)]
    everyone = len(reports) == world_size
    if not failures:
        return TrialVerdict(result=_result(reports[0]), keep=True) if everyone else None
    rank, cause = min(failures, key=lambda failure: _order(failure[1], table))
    clean = is_clean(cause)
    if not everyone:
        uncaused = CONSEQUENCE_GRACE_SECONDS if _order(cause, table) == _CONSEQUENCE else GRACE_SECONDS
        if waited < (CLEAN_GRACE_SECONDS if clean else uncaused):
            return None
    keep = clean and everyone and all(_leaves_fit(report, cause) for report in reports.values())
    return TrialVerdict(result=_failed(attempt, rank, cause, table), keep=keep, rejoin=keep, rank=rank)


def died(attempt: str, rank: int, death: Death, table: FailureTable | None = None) -> TrialResult:
    """Return the result of a trial that was ended by a rank's death, by the failure table."""
    row = row_of(death, table or failure_table())
    says_why = death.exit_code is not None and death.exit_code >= 0
    last = death.output.splitlines()[-1:] if says_why else []
    oom = ["the kernel killed a process for lack of memory"] if death.out_of_memory_kill and row.verify else []
    return TrialResult(
        attempt=attempt,
        outcome=row.outcome,
        message=": ".join([f"rank {rank} {how_it_ended(death)} before the trial ended", *oom, *last]),
        traceback=death.output or None,
        cause=row.name,
    )


def row_of(death: Death, table: FailureTable) -> FailureRow:
    """Return the row of the failure table that matches a rank's death."""
    gone = (Sign.OUT_OF_REACH,) if death.exit_code is None else ()
    signs = (*gone, *((Sign.OOM_KILL,) if death.out_of_memory_kill else ()))
    return table.find(Evidence(exit_code=death.exit_code, signs=signs, output=death.output))[0]


def how_it_ended(death: Death) -> str:
    """Describe the end of a process."""
    if death.exit_code is None:
        return "is out of reach"
    if death.exit_code >= 0:
        return f"exited with code {death.exit_code}"
    try:
        return f"was killed by {signal.Signals(-death.exit_code).name}"
    except ValueError:
        return f"was killed by signal {-death.exit_code}"


def _is_result(report: Report) -> bool:
    return not isinstance(report, Death) and report["kind"] == MessageKind.RESULT


def _result(report: Report) -> TrialResult:
    assert not isinstance(report, Death)
    return from_plain(MicrobenchmarkResult if "rows" in report["result"] else TrialResult, report["result"])


def is_clean(report: Report) -> bool:
    """Whether this is a failure after which its own rank's process can serve the next trial."""
    return not isinstance(report, Death) and not _is_result(report) and report["outcome"] in CLEAN and not report["retire"]


def _leaves_fit(report: Report, cause: Report) -> bool:
    """Whether a rank can serve the next trial after a clean `cause`: it failed equally, as a consequence, or had succeeded."""
    if isinstance(report, Death) or isinstance(cause, Death):
        return False
    if _is_result(report) or report["collective"]:
        return True
    return all(report[name] == cause[name] for name in ("outcome", "rule", "retire"))


def _order(report: Report, table: FailureTable) -> int:
    if isinstance(report, Death):
        return _CONSEQUENCE if row_of(report, table).consequence else 0
    return _CONSEQUENCE if report["collective"] else 1


def _failed(attempt: str, rank: int, cause: Report, table: FailureTable) -> TrialResult:
    if isinstance(cause, Death):
        return died(attempt, rank, cause, table)
    return TrialResult(
        attempt=attempt,
        outcome=Outcome(cause["outcome"]),
        message=cause["message"] if cause["outcome"] in CLEAN else f"rank {rank}: {cause['message']}",
        rule=cause["rule"],
        traceback=cause["traceback"],
        cause=cause["cause"],
    )
