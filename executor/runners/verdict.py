"""What becomes of a trial, from what each of its ranks reported."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from executor.runners.messages import Kind, Message
from executor.runners.transport import Death
from search_spaces.microbenchmark import MicrobenchmarkResult
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain
from search_spaces.trial import TrialResult

Report = Message | Death
"""How a rank's part of a trial ended: a `result` or `failure` message, or its death."""

CLEAN = (Outcome.INVALID, Outcome.INFEASIBLE, Outcome.WRONG)
"""Outcomes that leave the rank processes fit for the next trial, if all ranks came to the same one."""
GRACE_SECONDS = 0.5
"""How long after the first failure the ranks are heard: the cause may come after its consequences."""
CLEAN_GRACE_SECONDS = 2.0
"""The same where the failure is clean: a gang that is kept saves more than this."""

_TAKEN_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a trial and what to do with its ranks."""

    result: TrialResult
    keep: bool
    """Whether the rank processes can serve the next trial."""
    rejoin: bool = False
    """Whether they need a new process group first: collectives of the failed trial may be left half done in the old one."""


def judge(attempt: str, reports: Mapping[int, Report], world_size: int, waited: float) -> Verdict | None:
    """Decide, or return None to hear the other ranks first.

    1. Without a failure: rank 0's result, when every rank has given its own.
    2. With one: after a grace of `waited` seconds since the first, or when every rank has reported, the cause is told. A
       death comes before an error, for it makes the others fail, in whatever words; an error comes before a broken
       collective, which is always a consequence; among equals the first to arrive.
    """
    failures = [(rank, report) for rank, report in reports.items() if not _is_result(report)]
    everyone = len(reports) == world_size
    if not failures:
        return Verdict(result=_result(reports[0]), keep=True) if everyone else None
    rank, cause = min(failures, key=lambda failure: _order(failure[1]))
    clean = not isinstance(cause, Death) and cause["outcome"] in CLEAN
    if not everyone and waited < (CLEAN_GRACE_SECONDS if clean else GRACE_SECONDS):
        return None
    keep = clean and len(failures) == world_size and len({_kind(report) for _, report in failures}) == 1
    return Verdict(result=_failed(attempt, rank, cause), keep=keep, rejoin=keep)


def died(attempt: str, rank: int, death: Death) -> TrialResult:
    """The result of a trial that a rank's death ended: LOST where it was taken from outside, else FAILED."""
    lost = death.exit_code in _TAKEN_FROM_OUTSIDE
    says_why = death.exit_code is not None and death.exit_code >= 0
    last = death.output.splitlines()[-1:] if says_why else []
    return TrialResult(
        attempt=attempt,
        outcome=Outcome.LOST if lost else Outcome.FAILED,
        message=": ".join([f"rank {rank} {how_it_ended(death)} before the trial ended", *last]),
        traceback=death.output or None,
    )


def how_it_ended(death: Death) -> str:
    """The end of a process in words."""
    if death.exit_code is None:
        return "is out of reach"
    if death.exit_code >= 0:
        return f"exited with code {death.exit_code}"
    try:
        return f"was killed by {signal.Signals(-death.exit_code).name}"
    except ValueError:
        return f"was killed by signal {-death.exit_code}"


def _is_result(report: Report) -> bool:
    return not isinstance(report, Death) and report["kind"] == Kind.RESULT


def _result(report: Report) -> TrialResult:
    assert not isinstance(report, Death)
    return from_plain(MicrobenchmarkResult if "rows" in report["result"] else TrialResult, report["result"])


def _order(report: Report) -> int:
    if isinstance(report, Death):
        return 0
    return 2 if report["collective"] else 1


def _kind(report: Report) -> tuple[str, str | None]:
    return ("", None) if isinstance(report, Death) else (report["outcome"], report["rule"])


def _failed(attempt: str, rank: int, cause: Report) -> TrialResult:
    if isinstance(cause, Death):
        return died(attempt, rank, cause)
    return TrialResult(
        attempt=attempt,
        outcome=Outcome(cause["outcome"]),
        message=f"rank {rank}: {cause['message']}" if cause["outcome"] == Outcome.FAILED else cause["message"],
        rule=cause["rule"],
        traceback=cause["traceback"],
    )
