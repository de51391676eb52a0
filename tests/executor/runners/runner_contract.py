"""The test case that every runner passes, and the part of it that is for runners of processes."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from executor.process_tree import start_of
from executor.runners.runner import Runner
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import LogLines, Progress, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

WORLD_SIZE = 2
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent)}
TRIAL_FUNCTION = "scripted:run_trial"
MODEL = ModelSpec(
    name="tiny",
    family="llama",
    num_layers=1,
    hidden_size=8,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    ffn_hidden_size=8,
    vocab_size=8,
    sequence_length=8,
)
_numbers = itertools.count()


def request_for(what: str = "measure", **changes: object) -> TrialRequest:
    """A request whose `engine` tells the stand-in of the trial what to do."""
    fields: dict[str, object] = {
        "attempt": f"attempt-{next(_numbers)}",
        "model": MODEL,
        "config": TrialConfig(),
        "workload": Workload(global_batch_size=2, sequence_length=8),
        "world_size": WORLD_SIZE,
        "engine": what,
        "timeout_seconds": 60.0,
    }
    return TrialRequest(**{**fields, **changes})


def watch(runner: Runner, until: Callable[[list], bool], seconds: float = 180.0) -> list:
    """Collect (handle, event) until the condition holds."""
    seen: list = []
    limit = time.monotonic() + seconds
    while not until(seen):
        assert time.monotonic() < limit, f"waited {seconds} s; came: {seen}"
        seen += runner.events(0.5)
    return seen


def results(events: list) -> list[TrialResult]:
    return [event for _, event in events if isinstance(event, TrialResult)]


def printed(events: list, rank: int) -> str:
    return "".join(event.text for _, event in events if isinstance(event, LogLines) and event.rank == rank)


def run(runner: Runner, what: str = "measure", **changes: object) -> TrialResult:
    """Run one trial; its result must come alone."""
    request = request_for(what, **changes)
    assert runner.submit(request) == request.attempt
    seen = watch(runner, results)
    assert all(handle == event.attempt == request.attempt for handle, event in seen)
    (result,) = results(seen)
    return result


def descendants() -> set[int]:
    """The rank processes below this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            words = (process.name(), *process.cmdline())  # the name of one that was forked; see `tests.forked_ranks`
            if any("rank_main" in word for word in words) and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def gone(pids: set[int], seconds: float = 60.0) -> bool:
    """Whether all these processes end within `seconds`."""
    limit = time.monotonic() + seconds
    while any(start_of(pid) is not None for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


class RunnerContract:
    """What holds for every runner. The module gives the fixture `make_runner`; one `runner` serves the whole module."""

    def test_a_trial_that_ends_well_is_OK(self, runner: Runner) -> None:
        assert run(runner).outcome is Outcome.OK
        assert runner.capacity() == 1

    def test_each_attempt_gets_exactly_one_result(self, runner: Runner) -> None:
        handles = [runner.submit(request_for()) for _ in range(4)]
        assert runner.capacity() == 0
        seen = watch(runner, lambda events: len(results(events)) == 4)
        seen += runner.events(0.3)
        assert [result.attempt for result in results(seen)] == handles

    def test_nothing_to_tell_is_no_event(self, runner: Runner) -> None:
        assert runner.events(0.2) == []

    def test_a_waiting_attempt_can_be_cancelled(self, runner: Runner, tmp_path: Path) -> None:
        first, second = runner.submit(request_for(f"held:{tmp_path / 'end'}")), runner.submit(request_for())
        runner.cancel(second, "not needed")
        (tmp_path / "end").touch()
        outcomes = {result.attempt: result for result in results(watch(runner, lambda events: len(results(events)) == 2))}
        assert outcomes[first].outcome is Outcome.OK
        assert (outcomes[second].outcome, outcomes[second].message) == (Outcome.CANCELLED, "not needed")

    def test_cancelling_what_is_unknown_or_over_is_ignored(self, runner: Runner) -> None:
        over = run(runner).attempt
        runner.cancel(over, "too late")
        runner.cancel("no such attempt", "never was")
        assert runner.events(0.2) == []
        assert run(runner).outcome is Outcome.OK


class ProcessRunnerContract(RunnerContract):
    """What holds for runners of rank processes."""

    fewest_ranks = WORLD_SIZE
    """Ranks of a trial whose test does not need several. Each new rank imports torch, which takes three seconds of a core."""

    def test_ranks_find_nothing_of_the_environment_but_what_is_listed(self, runner: Runner) -> None:
        seen = run(runner).environment
        assert (seen["secrets"], seen["secrets_of_parent"]) == ("", "0")

    def test_the_second_trial_is_warm(self, runner: Runner) -> None:
        first, second = run(runner), run(runner)
        assert second.warm
        assert second.environment["pid"] == first.environment["pid"]
        assert second.phase_seconds["setup"] < 2.0

    def test_a_trial_of_another_environment_has_processes_started_for_it(self, runner: Runner) -> None:
        passive = TrialConfig(environment="OMP_WAIT_POLICY=passive")
        configs = (TrialConfig(), passive, passive, TrialConfig())
        ended = [run(runner, config=config, world_size=self.fewest_ranks) for config in configs]
        assert [result.environment["policy"] for result in ended] == ["", "passive", "passive", ""]
        assert [result.warm for result in ended[1:]] == [False, True, False]
        assert len({result.environment["pid"] for result in ended}) == 3
        assert ended[1].phase_seconds["setup"] > ended[2].phase_seconds["setup"]

    def test_a_variable_that_is_not_allowed_reaches_no_process(self, runner: Runner) -> None:
        refused = run(runner, config=TrialConfig(environment="LD_PRELOAD=/tmp/theirs.so"))
        assert (refused.outcome, refused.rule) == (Outcome.INVALID, "environment-variables")
        assert refused.message.startswith("environment: LD_PRELOAD may not be set; use some of ")
        assert run(runner).outcome is Outcome.OK

    def test_progress_comes_before_the_result(self, runner: Runner, tmp_path: Path) -> None:
        runner.submit(request_for(f"held:{tmp_path / 'end'}"))
        seen = watch(runner, lambda events: any(isinstance(event, Progress) for _, event in events))
        (tmp_path / "end").touch()
        seen += watch(runner, results)
        assert [event.step for _, event in seen if isinstance(event, Progress)] == [0, 1, 2]

    def test_what_ranks_print_is_heard_while_they_run(self, runner: Runner, tmp_path: Path) -> None:
        runner.submit(request_for(f"chatter:{tmp_path / 'end'}"))
        seen = watch(runner, lambda events: all("begins" in printed(events, rank) for rank in (0, 1)))
        (tmp_path / "end").touch()
        seen += watch(runner, results)
        for rank in (0, 1):
            # Both streams, also what was printed just before the result, which comes last.
            assert printed(seen, rank) == f"rank {rank} begins\nto stderr ✓\nends without a newline"
        assert isinstance(seen[-1][1], TrialResult)

    @pytest.mark.parametrize(
        ("what", "outcome", "rule"),
        [
            ("refuse", Outcome.INVALID, "pipeline-zero-3"),
            ("exceed", Outcome.INFEASIBLE, None),
            ("allocate", Outcome.INFEASIBLE, None),
            ("diverge", Outcome.WRONG, None),
        ],
    )
    def test_a_clean_failure_keeps_the_ranks_warm(self, runner: Runner, what: str, outcome: Outcome, rule: str | None) -> None:
        before = run(runner)
        failed = run(runner, what)
        assert (failed.outcome, failed.rule) == (outcome, rule)
        assert failed.message
        after = run(runner)
        assert (after.outcome, after.losses) == (Outcome.OK, (float(WORLD_SIZE**2),))
        assert after.environment["pid"] == before.environment["pid"]

    def test_a_python_error_is_FAILED_with_its_traceback(self, runner: Runner) -> None:
        failed = run(runner, "stumble@1")
        assert (failed.outcome, failed.message) == (Outcome.FAILED, "rank 1: KeyError: 'missing key'")
        assert failed.traceback is not None
        assert "in stumble" in failed.traceback
        assert "rank_loop" not in failed.traceback

    @pytest.mark.parametrize(
        ("what", "outcome", "message"),
        sampled(
            [
                ("die@0", Outcome.LOST, "rank 0 was killed by SIGKILL before the trial ended"),
                ("leave@1", Outcome.FAILED, "rank 1 exited with code 3 before the trial ended: leaving without a word"),
            ],
            every=2,
        ),
    )
    def test_a_dead_rank_ends_the_trial(self, runner: Runner, what: str, outcome: Outcome, message: str) -> None:
        failed = run(runner, what)
        assert (failed.outcome, failed.message) == (outcome, message), "soon, or its limit of a minute would have ended it"
        assert gone(descendants())

    def test_a_hang_is_ended_with_all_that_it_started_and_the_next_trial_runs(self, runner: Runner) -> None:
        runner.submit(request_for("spawn", timeout_seconds=5.0))
        seen = watch(runner, results)
        (child,) = {int(event.message) for _, event in seen if isinstance(event, Progress) and event.message}
        assert results(seen)[0].outcome is Outcome.TIMEOUT
        assert "build" in results(seen)[0].message
        assert gone({child} | descendants())
        assert run(runner).outcome is Outcome.OK

    def test_a_running_attempt_can_be_cancelled_from_another_thread(self, runner: Runner) -> None:
        run(runner)
        handle = runner.submit(request_for("hang", timeout_seconds=600.0))
        canceller = threading.Timer(0.3, runner.cancel, (handle, "stopped by a person"))
        canceller.start()
        (cancelled,) = results(watch(runner, results))
        canceller.join()
        assert (cancelled.outcome, cancelled.message) == (Outcome.CANCELLED, "stopped by a person")
        assert gone(descendants())

    def test_more_ranks_than_there_is_room_for_are_refused(self, runner: Runner) -> None:
        refused = run(runner, world_size=1000)
        assert (refused.outcome, refused.rule) == (Outcome.INVALID, "world_size")

    def test_users_packages_may_have_the_names_of_ours(self, runner: Runner, project: Path) -> None:
        model = FactoryModel(reference="project:build", parameter_count=1, python_path=(str(project),))
        result = run(runner, "import_users", model=model, world_size=self.fewest_ranks)
        assert result.outcome is Outcome.OK, result.traceback or result.message

    def test_close_leaves_no_process(self, make_runner: Callable[[], Runner]) -> None:
        with make_runner() as runner:
            before = descendants()
            runner.submit(request_for("hang", world_size=self.fewest_ranks))
            watch(runner, lambda events: any(isinstance(event, Progress) for _, event in events))
            mine = descendants() - before
            assert len(mine) >= self.fewest_ranks
        runner.close()
        assert gone(mine)
