"""The Ray runner: the contract, and what is its own."""

import dataclasses
import importlib.metadata
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable

import pytest
import ray
from runner_contract import ENVIRONMENT, TRIAL_FUNCTION, ProcessRunnerContract, run

from executor.errors import RunnerError
from executor.runners.ray import RayRunner, nodes
from executor.runners.ray.cluster import RayCluster
from executor.runners.ray.nodes import kernel_packages
from search_spaces.kernels import PACKAGES
from search_spaces.outcome import Outcome
from search_spaces.trial import COMPARABLE

pytestmark = pytest.mark.ray
MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.9.0
    Python: 3.10.1
This process on 10.0.0.1:0 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


def make(**options: object) -> RayRunner:
    return RayRunner(2, gangs=1, environment=ENVIRONMENT, trial_function=TRIAL_FUNCTION, **options)


@pytest.fixture(scope="module")
def make_runner(started_ray: None) -> Callable[[], RayRunner]:
    return make


class TestRayRunner(ProcessRunnerContract):
    """The contract on Ray, and what is its own."""

    fewest_ranks = 1
    proves = (
        "test_users_packages_may_have_the_names_of_ours",
        "test_close_leaves_no_process",
        "test_a_trial_of_another_environment_has_processes_started_for_it",
        "test_a_hang_is_ended_with_all_that_it_started_and_the_next_trial_runs",
        "test_a_dead_rank_ends_the_trial",
        "test_a_running_attempt_can_be_cancelled_from_another_thread",
    )

    def test_ranks_that_cannot_be_placed_are_told_with_what_is_missing(self, runner: RayRunner) -> None:
        with pytest.raises(RunnerError, match=r"2 ranks cannot be placed .*: 200 CPU needed, \d free of 4"):
            make(cpus_per_rank=100.0, placement_seconds=0.5)
        assert ray.is_initialized()  # it was there before, so it is not ended

    @pytest.mark.prove
    def test_an_actor_that_is_gone_is_LOST_and_made_anew(self, runner: RayRunner) -> None:
        run(runner)
        actor = runner._node_pool.slots[1]._actor
        ray.kill(actor)
        with pytest.raises(ray.exceptions.RayActorError):
            while True:  # nobody waits for a kill: until it has come. Of no life, this ends nothing
                ray.get(actor.kill.options(concurrency_group="control").remote(-1), timeout=60)
        lost = run(runner)
        assert lost.outcome in (Outcome.LOST, Outcome.OK)
        assert run(runner).outcome is Outcome.OK

    def test_a_job_for_gpus_on_a_cluster_without_any_is_one_clear_line(self, started_ray: None) -> None:
        with pytest.raises(RunnerError, match=r"^the job is for GPUs and the Ray cluster has none; start Ray on nodes"):
            make(device="cuda")

    @pytest.mark.prove
    def test_one_rank_alone_has_all_cores_and_two_that_take_turns_say_so(self, runner: RayRunner) -> None:
        cores = len(os.sched_getaffinity(0))
        more = min(cores + 1, 4)
        pair, alone = run(runner), run(runner, world_size=1)
        assert alone.environment["threads"] == str(cores)
        assert pair.environment["threads"] == str(max(1, cores // 2))
        assert alone.environment["pid"] == pair.environment["pid"]
        assert COMPARABLE not in alone.environment
        assert os.getpriority(os.PRIO_PROCESS, int(alone.environment["pid"])) == os.getpriority(os.PRIO_PROCESS, 0)
        assert (COMPARABLE in run(runner, world_size=more).environment) == (cores < more)


def test_an_address_where_nobody_listens_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        RunnerError, match=rf"^the Ray cluster at 127\.0\.0\.1:{port} does not answer: Connection refused; check"
    ):
        make(address=f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("says", "why"), [(None, "timed out"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what listens there is not a Ray head")]
)
def test_an_address_where_no_ray_listens_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], says: bytes | None, why: str
) -> None:
    """Without asking Ray, whose native code would log its attempts for minutes."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was asked"))
    monkeypatch.setattr("executor.runners.ray.cluster.CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            peer, _ = other.accept()
            with peer:
                if says is None:
                    peer.recv(100)
                    peer.recv(100)  # ends when the client has given up
                else:
                    peer.sendall(says)

        thread = threading.Thread(target=answer)
        thread.start()
        port = other.getsockname()[1]
        with pytest.raises(RunnerError, match=rf"^the Ray cluster at 127\.0\.0\.1:{port} does not answer: {why}; check"):
            make(address=f"127.0.0.1:{port}")
        thread.join()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("address", ["here", "ray://head:10001", "head:"])
def test_what_is_no_address_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RunnerError, match=rf"^{address} is not the address of a Ray cluster; give the head's HOST:PORT"):
        make(address=address)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "Could not find any running Ray instance\nmore lines",
            "does not answer: Could not find any running Ray instance; check",
        ),
        (MISMATCH, "the Ray cluster runs Ray 2.9.0 and Python 3.10.1, this process Ray 2.60.0 and Python 3.11.7; use the same"),
    ],
)
def test_what_ray_says_when_it_refuses_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, said: str, told: str) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # of this module's Ray, which is none to whoever is refused
    with pytest.raises(RunnerError, match=re.escape(told)):
        make(address="auto")


@pytest.mark.prove
def test_what_kernels_are_made_of_is_asked_on_the_nodes(started_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    living = [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
    assert kernel_packages("auto", living) == {}
    there = dataclasses.replace(PACKAGES["liger"], module="torch", distribution="torch")
    monkeypatch.setattr(nodes, "PACKAGES", {"liger": there})
    assert kernel_packages("auto", living) == {"torch": importlib.metadata.version("torch")}
    assert kernel_packages("auto", [*living, f"{1:056x}"]) is None, "one does not answer"


def test_a_cluster_that_asks_for_its_token_is_told_as_that(started_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        try:
            raise ray.exceptions.AuthenticationError(
                "RPC error: InvalidAuthToken: Authentication token is missing or incorrect"
            )
        except ray.exceptions.AuthenticationError as error:
            raise ConnectionError("Failed to connect") from error

    monkeypatch.setattr("executor.runners.ray.cluster._require_answer", lambda _: None)  # a head that asks speaks
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # of this module's Ray, which is none to whoever is refused
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            RunnerError, match=rf"^the Ray cluster at {address} asks for its token; set RAY_AUTH_MODE=token, with"
        ):
            make(address=address)


@pytest.mark.prove
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


@pytest.mark.prove
def test_Rays_notes_on_nodes_stay_out_of_stdout(started_ray: None, capfd: pytest.CaptureFixture[str]) -> None:
    note = {"lines": ["Raylet is terminated."], "pid": "raylet", "ip": None, "is_err": False, "job": None, "actor_name": None}
    ray._private.worker.print_to_stdstream(note, ignore_prefix=False)
    assert capfd.readouterr() == ("", "")
