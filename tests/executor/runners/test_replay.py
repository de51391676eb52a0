"""The replay runner: the contract, and its table."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from runner_contract import RunnerContract, request_for, results, run, watch

from executor.runners import replay
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig

FAST = TrialConfig(zero_stage=1)
MEASURED = TrialResult(attempt="of old", outcome=Outcome.OK, samples_per_second=Interval(mean=3.0, low=2.0, high=4.0))


@pytest.fixture(scope="module")
def make_runner() -> Callable[[], ReplayRunner]:
    return lambda: ReplayRunner(lambda config: MEASURED, seconds_per_trial=0.05)


class TestReplayRunner(RunnerContract):
    """The contract on a table."""


@pytest.mark.parametrize(
    "row", [MEASURED, to_plain(MEASURED), {"outcome": "OK", "samples_per_second": {"mean": 3, "low": 2, "high": 4}}]
)
def test_the_table_answers_under_the_attempt_that_asks(row: object) -> None:  # fmt: skip
    with ReplayRunner({FAST.hash: row}) as runner:
        result = run(runner, config=FAST)
    assert result.samples_per_second == MEASURED.samples_per_second


def test_what_is_not_in_the_table_is_FAILED() -> None:
    with ReplayRunner({}) as runner:
        result = run(runner, config=FAST)
    assert (result.outcome, FAST.hash in result.message) == (Outcome.FAILED, True)


def test_slots_answer_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with ReplayRunner({FAST.hash: MEASURED}, slots=2, seconds_per_trial=0.2) as runner:
        runner.submit(request_for(config=FAST))
        assert runner.capacity() == 1
        runner.submit(request_for(config=FAST))
        assert runner.capacity() == 0
        watch(runner, lambda events: len(results(events)) == 2)
        assert now[0] == pytest.approx(0.2)
