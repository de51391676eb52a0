"""The local runner with ranks that start in earnest: each is a Python of its own, which imports torch for seconds."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runner_contract import ENVIRONMENT, TRIAL_FUNCTION, ProcessRunnerContract, gone, request_for, run, watch

from executor.errors import RunnerError
from executor.runners.local import LocalRunner
from search_spaces.outcome import Outcome

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


@pytest.mark.nightly
class TestStart:
    """The part of the contract that depends on how ranks start. `test_local.py` has all of it with forked ranks."""

    test_ranks_find_nothing_of_the_environment_but_what_is_listed = (
        ProcessRunnerContract.test_ranks_find_nothing_of_the_environment_but_what_is_listed
    )
    test_users_packages_may_have_the_names_of_ours = ProcessRunnerContract.test_users_packages_may_have_the_names_of_ours
    fewest_ranks = 2  # those that run already


@pytest.mark.nightly
class TestContract(ProcessRunnerContract):
    """All of the contract."""


@pytest.mark.nightly
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


@pytest.mark.prove
def test_ranks_that_do_not_start_are_an_error_of_the_runner() -> None:
    with LocalRunner(1, trial_function="no_such_module:run") as runner:
        runner.submit(request_for(world_size=1))
        with pytest.raises(RunnerError, match="rank 0 did not start: ModuleNotFoundError: No module named 'no_such_module'"):
            watch(runner, lambda events: False)


@pytest.mark.prove
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
