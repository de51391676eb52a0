"""The local runner with forked ranks: the contract, and what is its own. `test_local_starts.py` starts them in earnest."""

from collections.abc import Callable

import pytest
from runner_contract import ENVIRONMENT, TRIAL_FUNCTION, ProcessRunnerContract, gone, request_for, results, run, watch

from executor.runners.local import LocalRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import Progress

pytestmark = pytest.mark.usefixtures("forked_ranks")


def make(world_size: int = 2, **options: object) -> LocalRunner:
    return LocalRunner(world_size, environment=ENVIRONMENT, trial_function=TRIAL_FUNCTION, **options)


@pytest.fixture(scope="module")
def make_runner() -> Callable[[], LocalRunner]:
    return make


class TestLocalRunner(ProcessRunnerContract):
    """The contract on plain processes."""


@pytest.mark.prove
def test_a_hang_tells_where_each_rank_stands_and_ends_with_its_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.runners.gang.STACK_SECONDS", 30.0)  # none is waited for that has printed
    monkeypatch.setattr("executor.runners.rank_process.STACK_TAIL_SECONDS", 1.0)
    with make() as runner:
        runner.submit(request_for("stand", timeout_seconds=6.0))
        seen = watch(runner, results)
        (daemon,) = {int(event.message) for _, event in seen if isinstance(event, Progress) and event.message}
        assert gone({daemon})
    (late,) = results(seen)
    assert (late.outcome, late.cause) == (Outcome.TIMEOUT, "time-limit")
    assert "ranks 0, 1 in measure, step 2, for" in late.message
    assert late.traceback is not None
    assert "in stand" in late.traceback
    assert "in hang_up" in late.traceback


@pytest.mark.prove
def test_processes_that_leak_files_are_recycled() -> None:
    with make(1) as runner:
        warm = [run(runner, what, world_size=1).warm for what in ("measure", "measure", "leak", "measure", "measure")]
    assert warm[:3] == [False, True, True]
    assert False in warm[3:]  # what a trial has left may be told while the next one runs
