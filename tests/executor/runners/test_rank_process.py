"""A rank process as its parent holds it, with programs that need no torch: its end, its traces, what it has printed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from runner_contract import gone

from executor import process_tree
from executor.runners import rank_process
from executor.runners.rank_process import RankProcess, end_all, stacks_of

ROOT = Path(__file__).parents[3]
PREAMBLE = """
import ctypes, faulthandler, os, signal, subprocess, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
faulthandler.register(signal.SIGUSR2, all_threads=True)
def daemon(*before):
    "A process in a session of its own whose parent has ended."
    shell = "setsid sleep 3600 >/dev/null 2>&1 & echo $!"
    return int(subprocess.run([*before, "/bin/sh", "-c", shell], stdout=subprocess.PIPE, timeout=60).stdout.split()[0])
def tell(*words): connection.send_bytes(" ".join(map(str, words)).encode())
"""
Start = Callable[[str], RankProcess]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is killed on a busy machine takes a while to be gone."""
    monkeypatch.setattr(process_tree, "KILL_SECONDS", 60.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[RankProcess] = []

    def program(lines: str) -> RankProcess:
        path = tmp_path / f"rank_{len(started)}.py"
        path.write_text(PREAMBLE + lines)
        started.append(RankProcess(str(path), trial_function=""))
        return started[-1]

    yield program
    for rank in started:
        rank.kill()


def told(rank: RankProcess) -> list[str]:
    rank.wait(60.0)
    *_, message = rank.receive()  # what was printed before it comes before it
    return message.decode().split()


def ended(rank: RankProcess) -> int:
    limit = time.monotonic() + 20.0
    while (code := rank.exit_code()) is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return code


def test_what_has_daemonised_ends_with_the_rank_also_where_its_environment_was_cleared(start: Start) -> None:
    rank = start("tell(daemon(), daemon('env', '-i')); time.sleep(3600)")
    daemons = set(map(int, told(rank)))
    assert all(psutil.pid_exists(daemon) for daemon in daemons)
    rank.end()
    assert gone(daemons, 0.1)


def test_what_has_daemonised_is_found_when_the_rank_has_died_before(start: Start) -> None:
    rank = start("tell(daemon()); os.kill(os.getpid(), signal.SIGKILL)")
    daemons = set(map(int, told(rank)))
    assert ended(rank) == -signal.SIGKILL
    assert gone(daemons, 0.1)


def test_ranks_are_ended_side_by_side(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    kill_all = rank_process.kill_all
    monkeypatch.setattr(rank_process, "kill_all", lambda roots: asked.append(len(roots)) or kill_all(roots))
    ranks = [start("tell(daemon()); time.sleep(3600)") for _ in range(4)]
    daemons = {int(told(rank)[0]) for rank in ranks}
    end_all(ranks)
    assert gone(daemons, 0.1)
    assert asked == [4]


def test_shared_memory_with_the_pid_of_a_killed_rank_is_removed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_tree, "SHARED_MEMORY", tmp_path)
    rank = start("tell(os.getpid(), daemon()); time.sleep(3600)")
    mine, child = told(rank)
    names = [f"torch_{mine}_12_0", f"__KMP_REGISTERED_LIB_{child}_0", f"torch_{os.getpid()}_12_0", f"other_{mine}_1"]
    for name in names:
        (tmp_path / name).touch()
    rank.kill()
    assert [(tmp_path / name).exists() for name in names] == [False, False, True, True]


def test_a_ledger_goes_with_its_last_rank(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(process_tree, "_ledger", [])
    monkeypatch.setattr(process_tree, "_recorded", set())
    ranks = [start("tell('x'); time.sleep(3600)") for _ in range(2)]
    (ledger,) = tmp_path.glob("autotune-runs-*/*")
    assert len(ledger.read_text().split()) == 2
    ranks[0].kill()
    assert process_tree.sweep_ledgers() == []
    assert ledger.exists()
    ranks[1].kill()
    assert not ledger.exists()


def test_a_kill_for_memory_is_told_by_the_count_of_the_control_group(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = start("tell('x'); time.sleep(3600)")
    told(rank)
    assert not rank.out_of_memory_kill()
    before = process_tree.out_of_memory_kills()
    monkeypatch.setattr("executor.runners.rank_process.out_of_memory_kills", lambda: before + 1)
    assert rank.out_of_memory_kill()


def test_the_count_is_read_from_either_version_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "memory.events", tmp_path / "memory.oom_control", tmp_path / "missing"]
    files[0].write_text("low 0\noom 4\noom_kill 3\noom_group_kill 9\n")
    files[1].write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    monkeypatch.setattr(process_tree, "_group_files", lambda: files)
    assert process_tree.out_of_memory_kills() == 5


def test_what_was_printed_before_a_message_is_no_more_told_of(start: Start) -> None:
    rank = start(
        "print('of the first'); tell('x'); connection.recv_bytes(); print('of the second'); tell('y'); time.sleep(3600)"
    )
    told(rank)
    time.sleep(0.1)  # the output is read by a thread
    assert rank.tail() == "of the first"
    rank.send(b"go")
    told(rank)
    time.sleep(0.1)
    assert rank.tail() == "of the second"


def test_a_rank_that_hangs_tells_where(start: Start) -> None:
    rank = start("def stuck():\n    tell('x')\n    time.sleep(3600)\nstuck()")
    told(rank)
    silent = start("signal.signal(signal.SIGUSR2, signal.SIG_IGN); tell('x'); time.sleep(3600)")
    told(silent)
    for _ in range(20):  # a second may be too short for it to print
        stacks = stacks_of({0: rank, 1: silent}, 1.0)
        assert 1 not in stacks
        if "in stuck" in stacks.get(0, ""):
            break
    assert "in stuck" in stacks[0]


CRASHED = """
import os, sys, time
from executor import process_tree
process_tree.MARK = "AUTOTUNE_RUN_TEST"
from executor import process_tree
from executor.runners.rank_process import RankProcess
rank = RankProcess(sys.argv[1], trial_function="")
rank.wait(20)
print(rank.receive()[0].decode(), flush=True)
time.sleep(3600)
"""


def test_what_a_killed_parent_has_left_is_swept_and_nothing_else(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mark of its own: any first rank of another test that runs beside this one sweeps as well.
    for module in (process_tree, rank_process):
        monkeypatch.setattr(module, "MARK", "AUTOTUNE_RUN_TEST")
    program = tmp_path / "left.py"
    program.write_text(PREAMBLE + "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\ntell(os.getpid(), daemon())\ntime.sleep(3600)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    driver = subprocess.Popen([sys.executable, "-c", CRASHED, str(program)], env=environment, stdout=subprocess.PIPE, text=True)
    with driver:
        rank, daemon = map(int, driver.stdout.readline().split())
        mine = start("tell(daemon()); time.sleep(3600)")
        alive = int(told(mine)[0])
        assert daemon not in process_tree.kill_strays()
        driver.kill()
    assert gone({rank})
    assert psutil.pid_exists(daemon)
    assert daemon in process_tree.kill_strays()
    assert gone({daemon})
    assert psutil.pid_exists(alive)

    monkeypatch.setattr(process_tree, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"torch_{rank}_1_0").touch()
    assert process_tree.sweep_ledgers() == [f"torch_{rank}_1_0"]
    assert list(tmp_path.glob("autotune-runs-*/*")) == []
