"""The local runner: the contract, and what is its own."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runner_contract import (
    ENVIRONMENT,
    TRIAL_FUNCTION,
    ProcessRunnerContract,
    gone,
    request_for,
    results,
    run,
    watch,
)

from executor.errors import RunnerError
from executor.runners.local import LocalRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import Progress

ROOT = Path(__file__).parents[3]
DRIVER = """
import signal, sys, time
from runner_contract import *
from executor.runners.local import LocalRunner
signal.signal(signal.SIGINT, lambda *_: None)
with LocalRunner(1, environment=ENVIRONMENT, trial_function=TRIAL_FUNCTION) as runner:
    runner.submit(request_for("stream", world_size=1))
    seen = watch(runner, lambda events: events)
    print(*descendants(), flush=True)
    seen += watch(runner, lambda events: results(seen + events))
    print(results(seen)[0].outcome, flush=True)
    runner.submit(request_for("hang", world_size=1))
    watch(runner, lambda events: False)
"""


def make(world_size: int = 2, **options: object) -> LocalRunner:
    return LocalRunner(world_size, environment=ENVIRONMENT, trial_function=TRIAL_FUNCTION, **options)


@pytest.fixture(scope="module")
def make_runner() -> Callable[[], LocalRunner]:
    return make


class TestLocalRunner(ProcessRunnerContract):
    """The contract on plain processes."""


def test_one_rank_shares_no_core_and_logs_what_it_prints(tmp_path: Path) -> None:
    with make(1, log_directory=tmp_path / "logs") as runner:
        result = run(runner, world_size=1)
        assert result.outcome is Outcome.OK
        assert not result.warm
        assert result.environment["threads"] == str(len(os.sched_getaffinity(0)))
        assert run(runner, "leave", world_size=1).outcome is Outcome.FAILED
    log = tmp_path / "logs" / "rank-0.log"
    assert log.read_text() == "leaving without a word\n"
    assert (stat.S_IMODE(log.parent.stat().st_mode), stat.S_IMODE(log.stat().st_mode)) == (0o700, 0o600)


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


def test_processes_that_leak_files_are_recycled() -> None:
    with make(1) as runner:
        warm = [run(runner, what, world_size=1).warm for what in ("measure", "measure", "leak", "measure", "measure")]
    assert warm[:3] == [False, True, True]
    assert False in warm[3:]  # what a trial has left may be told while the next one runs


def test_ranks_that_do_not_start_are_an_error_of_the_runner() -> None:
    with LocalRunner(1, trial_function="no_such_module:run") as runner:
        runner.submit(request_for(world_size=1))
        with pytest.raises(RunnerError, match="rank 0 did not start: ModuleNotFoundError: No module named 'no_such_module'"):
            watch(runner, lambda events: False)


def test_ctrl_c_passes_the_ranks_by_and_they_end_with_a_killed_parent() -> None:
    path = os.pathsep.join((str(ROOT), ENVIRONMENT["PYTHONPATH"]))
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with driver:
        ranks = {int(pid) for pid in driver.stdout.readline().split()}
        assert ranks
        os.killpg(driver.pid, signal.SIGINT)
        assert driver.stdout.readline().strip() == "OK"
        assert all(psutil.pid_exists(pid) for pid in ranks)
        driver.kill()
    assert gone(ranks)
