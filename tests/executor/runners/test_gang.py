"""A gang over a scripted transport: what becomes of starts that fail and of ranks that die between trials."""

import signal
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
from runner_contract import request_for

from executor.errors import RunnerError, failure_table
from executor.runners import gang as gang_module
from executor.runners import watchdog
from executor.runners.gang import Gang
from executor.runners.transport import NO_VARIABLES, Death, Message, RankTransport
from search_spaces.errors import KnobValueError
from search_spaces.failure import rows_from
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig

READY = {"kind": "ready", "host": "a", "accelerator": None, "device_count": 0, "visible_devices": None}
READY |= {"torch": "2.13.0+cpu", "torch_build": "cpu", "driver_devices": 0}


class OneRank(RankTransport):
    """A rank that answers as it is told to; by default everything goes well."""

    world_size = 1
    address = "127.0.0.1"

    def __init__(self) -> None:
        self.starts: list[tuple[str, ...]] = []
        self.variables: list[dict[str, str]] = []
        self.inbox: list[tuple[int, Message | Death]] = []
        self.greeting: Message | Death = READY
        self.answers: dict[str, list[Message | Death | list[Message]]] = {}

    def start(self, python_path: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES) -> None:
        self.starts.append(tuple(python_path))
        self.variables.append(dict(variables))
        self.inbox = [(0, self.greeting)]

    def send(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        well: dict[str, Message] = {"join": {"kind": "joined"}}
        if kind == "run":
            done = TrialResult(attempt=message["request"]["attempt"], outcome=Outcome.OK)
            well["run"] = {"kind": "result", "result": to_plain(done)}
        scripted = self.answers.get(kind)
        answer = scripted.pop(0) if scripted else well[kind]
        if answer:
            self.inbox += [(rank, each) for each in (answer if isinstance(answer, list) else [answer])]

    def receive(self, timeout: float) -> list[tuple[int, Message | Death]]:
        came, self.inbox = self.inbox, []
        return came

    def stacks(self, seconds: float) -> dict[int, str]:
        return {0: "in a collective"}

    def kill(self) -> None:
        self.inbox = []

    def close(self) -> None:
        self.kill()


def finish(gang: Gang) -> TrialResult:
    for _ in range(20):
        for event in gang.poll(0.0):
            if isinstance(event, TrialResult):
                return event
    raise AssertionError("no result")


def one(gang: Gang) -> TrialResult:
    gang.start(request_for(world_size=1))
    return finish(gang)


def test_ranks_are_started_once_for_many_trials() -> None:
    transport = OneRank()
    gang = Gang(transport, python_path=["/theirs"])
    assert [one(gang).warm for _ in range(3)] == [False, True, True]
    assert transport.starts == [("/theirs",)]


def test_ranks_that_start_ahead_of_their_first_trial_are_the_ones_that_run_it() -> None:
    transport = OneRank()
    gang = Gang(transport, python_path=["/theirs"])
    request = request_for(world_size=1)
    gang.warm_up(request.model)
    gang.warm_up(request.model)
    assert (one(gang).warm, one(gang).warm) == (False, True)
    assert transport.starts == [("/theirs",)]


def test_a_death_of_ranks_that_start_ahead_is_told_by_the_first_trial() -> None:
    transport = OneRank()
    transport.greeting = Death(exit_code=1, output="no torch here")
    gang = Gang(transport)
    gang.warm_up(request_for(world_size=1).model)
    with pytest.raises(RunnerError, match="rank 0 did not start: it exited with code 1\nno torch here"):
        one(gang)


def test_ranks_that_started_ahead_for_another_folder_of_code_are_started_anew() -> None:
    transport = OneRank()
    gang = Gang(transport)
    gang.warm_up(FactoryModel(reference="m:f", parameter_count=1, python_path=("/other",)))
    assert one(gang).outcome is Outcome.OK
    assert transport.starts == [("/other",), ()]


def test_a_cold_rank_that_was_taken_from_outside_is_LOST() -> None:
    transport = OneRank()
    transport.greeting = Death(exit_code=-signal.SIGKILL, out_of_memory_kill=True)
    assert one(Gang(transport)).outcome is Outcome.LOST


def test_a_cold_rank_that_ends_of_itself_is_an_error_of_the_runner() -> None:
    transport = OneRank()
    transport.greeting = Death(exit_code=1, output="no torch here")
    with pytest.raises(RunnerError, match="rank 0 did not start: it exited with code 1\nno torch here"):
        one(Gang(transport))


def test_a_rank_that_died_between_trials_is_replaced() -> None:
    transport = OneRank()
    gang = Gang(transport)
    one(gang)
    transport.inbox.append((0, Death(exit_code=1)))
    result = one(gang)
    assert (result.outcome, result.warm, len(transport.starts)) == (Outcome.OK, False, 2)


def test_warm_ranks_that_cannot_change_their_group_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "REJOIN_SECONDS", 0.0)
    refusal = {"kind": "failure", "outcome": "INVALID", "message": "no", "rule": "r", "traceback": None}
    refusal |= {"collective": False, "cause": None, "retire": False}
    transport = OneRank()
    transport.answers = {"run": [refusal], "join": [{"kind": "joined"}, {}]}  # to the second join there is no answer
    gang = Gang(transport)
    assert one(gang).outcome is Outcome.INVALID
    assert one(gang).outcome is Outcome.OK
    assert len(transport.starts) == 2


def test_ranks_that_are_never_ready_are_an_error_of_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "START_SECONDS", 0.0)
    transport = OneRank()
    transport.answers = {"join": [{}]}
    with pytest.raises(RunnerError, match="not ready within"):
        one(Gang(transport))


def test_a_trial_without_an_answer_is_a_TIMEOUT() -> None:
    transport = OneRank()
    transport.answers = {"run": [{}]}
    gang = Gang(transport)
    gang.start(request_for(world_size=1, timeout_seconds=0.0))
    assert finish(gang).outcome is Outcome.TIMEOUT
    assert gang.attempt is None


def failure(outcome: str, cause: str, **changes: object) -> Message:
    fields = {"outcome": outcome, "cause": cause, "message": "why", "rule": None, "traceback": None, "collective": False}
    return {"kind": "failure", **fields, "retire": False, **changes}


def test_a_failure_has_its_cause_and_the_node_of_its_rank() -> None:
    transport = OneRank()
    transport.answers = {"run": [failure("FAILED", "python-error"), Death(exit_code=-signal.SIGTERM)]}
    gang = Gang(transport)
    failed, taken = one(gang), one(gang)
    assert (failed.outcome, failed.cause, failed.node) == (Outcome.FAILED, "python-error", "a")
    assert (taken.outcome, taken.cause, taken.node) == (Outcome.PREEMPTED, "preempted", "a")


def test_the_transport_may_know_the_node_by_a_better_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneRank, "node_of", lambda self, rank: f"node-of-{rank}")
    transport = OneRank()
    transport.answers = {"run": [Death(exit_code=137, out_of_memory_kill=True)]}
    result = one(Gang(transport))
    assert (result.outcome, result.cause, result.node) == (Outcome.INFEASIBLE, "kernel-oom", "node-of-0")
    ended = "rank 0 exited with code 137 before the trial ended"
    assert result.message == f"{ended}: the kernel killed a process for lack of memory"


def test_a_users_row_decides_of_a_death() -> None:
    rows = rows_from({"killed": {"outcome": "FAILED", "retries": 0}}, failure_table())
    transport = OneRank()
    transport.answers = {"run": [Death(exit_code=-signal.SIGKILL), Death(exit_code=-signal.SIGKILL)]}
    gang = Gang(transport)
    gang.start(request_for(world_size=1, failures=rows))
    assert finish(gang).outcome is Outcome.FAILED
    assert one(gang).outcome is Outcome.LOST


@pytest.mark.parametrize(("retire", "starts"), [(False, 1), (True, 2)])
def test_a_failure_that_a_process_may_not_get_over_retires_it(retire: bool, starts: int) -> None:
    transport = OneRank()
    transport.answers = {"run": [failure("INFEASIBLE", "device-memory", retire=retire)]}
    gang = Gang(transport)
    assert [one(gang).outcome, one(gang).outcome] == [Outcome.INFEASIBLE, Outcome.OK]
    assert len(transport.starts) == starts


def test_processes_are_recycled_after_so_many_trials() -> None:
    transport = OneRank()
    gang = Gang(transport, recycle_after=3)
    assert [one(gang).warm for _ in range(5)] == [False, True, True, False, True]
    assert len(transport.starts) == 2


def test_processes_that_hold_what_trials_left_are_recycled() -> None:
    transport = OneRank()
    gang = Gang(transport)
    warm = []
    for descriptors in (10, 20, 20, 500, 10, 10):
        warm.append(one(gang).warm)
        rest = {"resident_bytes": 10**8, "descriptors": descriptors, "children": 0}
        transport.inbox.append((0, {"kind": "rested", "rest": rest}))
    assert warm == [False, True, True, True, False, True]


@pytest.mark.parametrize("kind", ["reserved_bytes", "pinned_bytes"])
def test_memory_that_a_failed_trial_has_left_ends_the_processes_before_the_next_one_runs(kind: str) -> None:
    transport = OneRank()
    gang = Gang(transport)
    rest = {"resident_bytes": 10**8, "descriptors": 10, "children": 0, "failed": True}
    for held, warm in ((2**30, False), (0, True)):
        transport.answers = {"run": [failure("INFEASIBLE", "device-memory")]}
        assert one(gang).outcome is Outcome.INFEASIBLE
        # It has cleaned up when the parent asks it to join again: what is left is heard before that is answered.
        transport.answers = {"join": [[{"kind": "rested", "rest": {**rest, kind: held}}, {"kind": "joined"}]]}
        result = one(gang)
        assert (result.outcome, result.warm) == (Outcome.OK, warm)
    assert len(transport.starts) == 2


def test_ranks_that_wait_for_one_that_failed_are_made_to_abort() -> None:
    transport = TwoRanks()
    gang = Gang(transport)
    request = request_for(world_size=2)
    gang.start(request)
    while not transport.ran:
        gang.poll(0.0)
    transport.inbox.append((1, failure("INFEASIBLE", "device-memory")))
    assert gang.poll(0.0) == []
    assert transport.aborted == [(0, request.attempt)]
    transport.inbox.append((0, failure("LOST", "collective", collective=True, retire=True)))
    assert finish(gang).outcome is Outcome.INFEASIBLE
    transport.ran = False
    gang.start(request_for(world_size=2))
    while not transport.ran:
        gang.poll(0.0)
    assert len(transport.starts) == 1, "both ranks go on, in a new group"


class TwoRanks(OneRank):
    """Two ranks that join, and answer nothing else."""

    world_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.aborted: list[tuple[int, str]] = []
        self.ran = False

    def start(self, python_path: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES) -> None:
        super().start(python_path, variables)
        self.inbox = [(0, READY), (1, READY)]

    def send(self, rank: int, message: Message) -> None:
        if message["kind"] == "join":
            self.inbox += [(rank, {"kind": "listening", "port": 1})] if rank == 0 else []
            self.inbox.append((rank, {"kind": "joined"}))
        elif message["kind"] == "abort":
            self.aborted.append((rank, message["attempt"]))
        self.ran = self.ran or message["kind"] == "run"


def test_a_trial_that_asks_for_it_has_fresh_processes() -> None:
    transport = OneRank()
    gang = Gang(transport)
    gang.warm_up(request_for(world_size=1).model)
    warm = []
    for fresh in (True, False, True):
        gang.start(request_for(world_size=1, fresh_processes=fresh))
        warm.append(finish(gang).warm)
    assert (warm, len(transport.starts)) == ([False, True, False], 2)


def test_processes_are_started_anew_at_each_change_of_the_environment() -> None:
    transport = OneRank()
    gang = Gang(transport)
    warm = []
    for text in ("", "", "MALLOC_ARENA_MAX=1", "MALLOC_ARENA_MAX=1", "MALLOC_ARENA_MAX=2", ""):
        gang.start(request_for(world_size=1, config=TrialConfig(environment=text)))
        warm.append(finish(gang).warm)
    assert warm == [False, True, False, True, False, False]
    assert transport.variables == [{}, {"MALLOC_ARENA_MAX": "1"}, {"MALLOC_ARENA_MAX": "2"}, {}]


def test_what_may_not_be_set_leaves_the_gang_as_it_was() -> None:
    transport = OneRank()
    gang = Gang(transport)
    one(gang)
    for text in ("LD_PRELOAD=/tmp/x.so", "PYTHONPATH=/tmp", "NCCL_NET_PLUGIN=evil", "NCCL_ALGO=Tree$(id)", "MALLOC_ARENA_MAX"):
        with pytest.raises(KnobValueError):
            gang.start(request_for(world_size=1, config=TrialConfig(environment=text)))
    assert one(gang).warm
    assert transport.variables == [{}]


def test_a_hang_ends_before_the_limit_and_tells_where(monkeypatch: pytest.MonkeyPatch) -> None:
    standing = {"phase": "measure", "step": 7, "since": watchdog.HANG_SECONDS + 1, "longest": 0.2}
    monkeypatch.setattr(gang_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    transport = OneRank()
    transport.answers = {"run": [{}]}
    gang = Gang(transport)
    request = request_for(world_size=1, timeout_seconds=1e6)
    gang.start(request)
    gang.poll(0.0)
    gang.poll(0.0)
    transport.inbox.append((0, {"kind": "beat", "attempt": request.attempt, "standing": standing}))
    result = finish(gang)
    assert (result.outcome, result.cause) == (Outcome.TIMEOUT, "hang")
    assert "a step took 0.2 s (rank 0 in measure, step 7, for 31 s); every rank was killed" in result.message
    assert result.traceback == "rank 0:\nin a collective"
