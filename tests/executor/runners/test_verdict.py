"""Whose failure is told, and which ranks are kept."""

import signal

import pytest

from executor.runners.transport import Death
from executor.runners.verdict import CLEAN_GRACE_SECONDS, CONSEQUENCE_GRACE_SECONDS, GRACE_SECONDS, judge
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial import TrialResult


def result(rank: int) -> dict:
    return {"kind": "result", "result": to_plain(TrialResult(attempt="a", outcome=Outcome.OK, losses=(float(rank),)))}


def failure(outcome: str, *, rule: str | None = None, collective: bool = False) -> dict:
    fields = {"outcome": outcome, "message": "why", "rule": rule, "traceback": "trace", "collective": collective}
    fields |= {"cause": "python-error", "retire": False}
    return {"kind": "failure", **fields}


def test_a_death_that_is_a_consequence_does_not_hide_the_cause() -> None:
    aborted = Death(exit_code=-signal.SIGABRT, output="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)")
    verdict = judge("a", {0: aborted, 1: failure("FAILED")}, 2, GRACE_SECONDS)
    assert verdict is not None
    assert (verdict.result.message, verdict.rank) == ("rank 1: why", 1)
    alone = judge("a", {0: aborted}, 2, CONSEQUENCE_GRACE_SECONDS)
    assert alone is not None
    assert (alone.result.outcome, alone.result.cause) == (Outcome.TIMEOUT, "collective-timeout")


KILLED = Death(exit_code=-signal.SIGKILL)
BROKEN = failure("FAILED", collective=True)


def test_rank_0_is_told_when_every_rank_has_ended() -> None:
    assert judge("a", {1: result(1)}, 2, 99.0) is None
    verdict = judge("a", {1: result(1), 0: result(0)}, 2, 0.0)
    assert verdict is not None
    assert (verdict.result.losses, verdict.keep, verdict.rejoin) == ((0.0,), True, False)


@pytest.mark.parametrize(
    ("reports", "outcome", "message"),
    [
        ({0: BROKEN, 1: failure("FAILED")}, Outcome.FAILED, "rank 1: why"),
        ({0: BROKEN, 1: KILLED}, Outcome.LOST, "rank 1 was killed by SIGKILL before the trial ended"),
        ({0: failure("FAILED"), 1: KILLED}, Outcome.LOST, "rank 1 was killed by SIGKILL before the trial ended"),
        ({1: failure("FAILED"), 0: failure("FAILED")}, Outcome.FAILED, "rank 1: why"),
        ({0: BROKEN, 1: Death()}, Outcome.LOST, "rank 1 is out of reach before the trial ended"),
        ({0: Death(exit_code=1, output="a\nlast")}, Outcome.FAILED, "rank 0 exited with code 1 before the trial ended: last"),
        ({0: Death(exit_code=-signal.SIGSEGV)}, Outcome.FAILED, "rank 0 was killed by SIGSEGV before the trial ended"),
    ],
)  # fmt: skip
def test_the_cause_is_told_and_not_its_consequence(reports: dict, outcome: Outcome, message: str) -> None:
    verdict = judge("a", reports, 2, GRACE_SECONDS)
    assert verdict is not None
    assert (verdict.result.outcome, verdict.result.message, verdict.keep) == (outcome, message, False)


def test_the_other_ranks_are_heard_for_a_while() -> None:
    assert judge("a", {0: KILLED}, 2, GRACE_SECONDS / 2) is None
    assert judge("a", {0: KILLED}, 2, GRACE_SECONDS) is not None
    assert judge("a", {0: BROKEN}, 2, CONSEQUENCE_GRACE_SECONDS / 2) is None, "its cause may come late"
    assert judge("a", {0: BROKEN}, 2, CONSEQUENCE_GRACE_SECONDS) is not None
    assert judge("a", {0: failure("INVALID")}, 2, CLEAN_GRACE_SECONDS / 2) is None
    verdict = judge("a", {0: failure("INVALID", rule="r")}, 2, CLEAN_GRACE_SECONDS)
    assert verdict is not None
    assert (verdict.result.outcome, verdict.result.rule, verdict.keep) == (Outcome.INVALID, "r", False)


@pytest.mark.parametrize(
    ("other", "keep"),
    [
        (failure("INFEASIBLE"), True), (failure("WRONG"), False), (BROKEN, True), (result(1), True), (KILLED, False),
        ({**failure("INFEASIBLE"), "retire": True}, False), (failure("FAILED"), False),
    ],
)  # fmt: skip
def test_ranks_that_agree_on_a_clean_failure_or_fail_for_it_are_kept_for_a_new_group(other: dict, keep: bool) -> None:
    verdict = judge("a", {0: failure("INFEASIBLE"), 1: other}, 2, CLEAN_GRACE_SECONDS)
    assert verdict is not None
    assert (verdict.keep, verdict.rejoin) == (keep, keep)
