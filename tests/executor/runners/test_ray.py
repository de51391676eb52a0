"""The Ray runner: the contract, and what is its own."""

import signal
import sys
from collections.abc import Callable

import pytest
import ray
from runner_contract import ENVIRONMENT, TRIAL_FUNCTION, ProcessRunnerContract, run

from executor.errors import RunnerError
from executor.runners.ray import RayRunner
from executor.runners.ray.cluster import RayCluster
from search_spaces.outcome import Outcome

pytestmark = pytest.mark.ray


def make(**options: object) -> RayRunner:
    return RayRunner(2, environment=ENVIRONMENT, trial_function=TRIAL_FUNCTION, **options)


@pytest.fixture(scope="module")
def make_runner(started_ray: None) -> Callable[[], RayRunner]:
    return make


class TestRayRunner(ProcessRunnerContract):
    """The contract on Ray, and what is its own."""

    def test_ranks_that_cannot_be_placed_are_told_with_what_is_missing(self, runner: RayRunner) -> None:
        with pytest.raises(RunnerError, match=r"2 ranks cannot be placed .*: 200 CPU wanted, \d free of 4"):
            make(cpus_per_rank=100.0, placement_seconds=0.5)
        assert ray.is_initialized()  # it was there before, so it is not ended

    def test_an_actor_that_is_gone_is_LOST_and_made_anew(self, runner: RayRunner) -> None:
        run(runner)
        transport = runner._gang._transport
        ray.kill(transport._actors[1])
        lost = run(runner)
        assert lost.outcome in (Outcome.LOST, Outcome.OK)
        assert run(runner).outcome is Outcome.OK


def test_an_address_that_does_not_answer_is_one_clear_line(started_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance\nmore lines")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(RunnerError, match=r"^the Ray cluster at 192\.0\.2\.1:6379 does not answer: Could not find any"):
        make(address="192.0.2.1:6379")


def test_SIGTERM_stays_with_whoever_handles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(*_: object) -> None: ...

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, lambda *_: sys.exit(15)))  # as Ray does
    former = signal.signal(signal.SIGTERM, mine)
    try:
        RayCluster(None, 1)
        assert signal.getsignal(signal.SIGTERM) is mine
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        RayCluster(None, 1)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, former)
