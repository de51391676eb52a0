"""A hang told from a slow step, where ranks stand, and whether warm processes have come back to their base."""

import dataclasses
import os
import threading
import time
from types import SimpleNamespace

import pytest
from runner_contract import request_for

from executor.runners import watchdog as heartbeat_module
from executor.runners.transport import Message
from executor.runners.watchdog import (
    COMPILE_SECONDS,
    DESCRIPTORS,
    FIRST_STEP_SECONDS,
    HANG_SECONDS,
    RESIDENT_BYTES,
    SLOW_FACTOR,
    ProcessUsage,
    RankHeartbeat,
    RankPosition,
    Watchdog,
    Wear,
    process_usage,
    stacks_text,
)
from search_spaces.models.command import CommandModel
from search_spaces.plain import from_plain
from search_spaces.trial import Progress
from search_spaces.trial_config import TrialConfig

LATE = 1_000.0


def watched(*standings: RankPosition, expected: float | None = None, **changes: object) -> Watchdog:
    """Ranks that stood so at second 0."""
    request = request_for(world_size=len(standings), expected_step_seconds=expected, **changes)
    watchdog = Watchdog(request)
    for rank, standing in enumerate(standings):
        watchdog.record(rank, standing, 0.0)
    return watchdog


def at(step: int, phase: str = "measure", since: float = 0.0, longest: float = 0.1) -> RankPosition:
    return RankPosition(phase=phase, step=step, since=since, longest=longest)


def test_a_rank_that_comes_on_keeps_the_trial_alive() -> None:
    watchdog = watched(at(3), at(3))
    assert "no rank has made progress for 1000 s, and a step took 0.1 s" in watchdog.hang(LATE)
    watchdog.record(1, at(4), LATE - 1)
    assert watchdog.hang(LATE) == ""


@pytest.mark.parametrize(
    ("longest", "expected", "most"),
    [
        (0.1, None, HANG_SECONDS),
        (5.0, None, 5.0 * SLOW_FACTOR),
        (0.1, 4.0, 4.0 * SLOW_FACTOR),
        (0.0, 0.1, FIRST_STEP_SECONDS + 0.1 * SLOW_FACTOR),
        (0.0, 10.0, FIRST_STEP_SECONDS + 10.0 * SLOW_FACTOR),
    ],
)
def test_a_slow_step_is_no_hang(longest: float, expected: float | None, most: float) -> None:
    watchdog = watched(at(3, longest=longest), at(3, longest=longest), expected=expected)
    assert watchdog.hang(most - 1) == ""
    assert watchdog.hang(most + 1)


@pytest.mark.parametrize("predicted", [0.001, 0.1, 3.0, 60.0])
def test_a_prediction_that_is_ten_times_too_short_ends_no_trial(predicted: float) -> None:
    """On a machine that a neighbour has half of the time, with a first step that takes a minute and a half to connect."""
    real = 10 * predicted * 1.9
    starting = at(0, "warmup", longest=0.0)
    assert watched(starting, starting, expected=predicted).hang(real + 90.0) == ""
    stepping = at(1, "warmup", longest=real)
    assert watched(stepping, stepping, expected=predicted).hang(real * 5) == ""


def test_a_first_step_that_compiles_has_the_time_for_it() -> None:
    standing = at(0, "warmup", longest=0.0)
    watchdog = watched(standing, standing, expected=0.5, config=TrialConfig(compile_blocks=True))
    assert watchdog.hang(FIRST_STEP_SECONDS + COMPILE_SECONDS) == ""
    assert watchdog.hang(FIRST_STEP_SECONDS + COMPILE_SECONDS + 11.0)


def test_a_first_step_that_hangs_is_found_by_its_prediction() -> None:
    standing = at(0, "warmup", longest=0.0)
    watchdog = watched(standing, standing, expected=0.5)
    told = watchdog.hang(FIRST_STEP_SECONDS + 11.0)
    assert told == "no rank has made progress for 131 s, and a step is predicted to take 0.5 s"
    assert watched(standing, standing).hang(LATE) == ""


@pytest.mark.parametrize("standing", [at(0, "build"), at(0, "warmup", longest=0.0), at(9, "close")])
def test_what_cannot_be_compared_has_the_limit_of_the_trial_alone(standing: RankPosition) -> None:
    assert watched(standing, standing).hang(LATE) == ""


def test_a_rank_that_was_never_heard_may_still_build() -> None:
    watchdog = Watchdog(request_for(world_size=2))
    watchdog.record(0, at(3), 0.0)
    assert watchdog.hang(LATE) == ""
    assert watchdog.places(5.0) == "rank 0 in measure, step 3, for 5 s; nothing was heard of rank 1"


def test_a_users_script_is_not_judged_by_its_reports() -> None:
    assert watched(at(3), at(3), model=CommandModel(arguments=("train.py",))).hang(LATE) == ""


def test_ranks_that_stand_together_are_told_together() -> None:
    watchdog = watched(at(3, since=2.0), at(2, since=9.0), at(3, since=1.0))
    assert watchdog.places(1.0) == "ranks 0, 2 in measure, step 3, for 2 s; rank 1 in measure, step 2, for 10 s"
    assert watchdog.behind() == [1, 0, 2]
    assert stacks_text({0: "a", 1: "b", 2: "c"}, watchdog.behind(), 2) == "rank 1:\nb\nrank 0:\na"
    assert stacks_text({}, [0], 2) is None


def test_a_pulse_goes_on_while_the_main_thread_waits() -> None:
    sent: list[Message] = []
    beaten = threading.Event()

    def send(message: Message) -> None:
        sent.append(message)
        if message["kind"] == "beat" and message["standing"]["step"] == 4:
            beaten.set()

    heartbeat = RankHeartbeat(send)
    heartbeat.begin("a", reports=False)
    heartbeat.report(Progress(attempt="a", phase="measure", step=4))
    assert beaten.wait(60.0)
    heartbeat.end()
    last = sent[-1]
    standing = from_plain(RankPosition, last["standing"])
    assert (last["attempt"], standing.phase, standing.step) == ("a", "measure", 4)
    assert all(message["kind"] == "beat" for message in sent)


def test_progress_is_told_as_often_as_it_can_be_read_and_every_new_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(monotonic=lambda: 100.0, sleep=time.sleep))
    sent: list[Message] = []
    heartbeat = RankHeartbeat(lambda message: sent.append(message))
    heartbeat.begin("a", reports=True)
    for step in range(5):
        heartbeat.report(Progress(attempt="a", phase="warmup", step=step))
    heartbeat.report(Progress(attempt="a", phase="measure", step=5))
    heartbeat.end()
    told = [(m["progress"]["phase"], m["progress"]["step"]) for m in sent if m["kind"] == "progress"]
    assert told == [("warmup", 0), ("measure", 5)]


BASE = ProcessUsage(resident_bytes=10**9, descriptors=40, children=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"resident_bytes": 10**9 + RESIDENT_BYTES}, ""),
        ({"resident_bytes": 2 * 10**9 + RESIDENT_BYTES}, "rank 1 holds 2,536,870,912 bytes of resident memory between trials"),
        ({"descriptors": 40 + DESCRIPTORS}, ""),
        ({"descriptors": 41 + DESCRIPTORS}, "rank 1 has 105 open files between trials, 40 after its second"),
        ({"children": 2}, "rank 1 has 2 processes of its own"),
        ({"reserved_bytes": RESIDENT_BYTES, "pinned_bytes": RESIDENT_BYTES}, ""),
        ({"reserved_bytes": RESIDENT_BYTES + 1}, "rank 1 holds 536,870,913 bytes of device memory between trials, 0 after"),
        ({"pinned_bytes": RESIDENT_BYTES + 1}, "rank 1 holds 536,870,913 bytes of pinned memory between trials, 0 after"),
    ],
)
def test_processes_that_do_not_come_back_to_their_base_are_worn(changes: dict, words: str) -> None:
    wear = Wear()
    for first in (ProcessUsage(resident_bytes=1, descriptors=1, children=0), BASE, dataclasses.replace(BASE, **changes)):
        for rank in range(2):
            wear.record(rank, first if rank else BASE)
    assert wear.restart_reason().startswith(words)
    assert bool(wear.restart_reason()) is bool(words)
    wear.clear()
    assert wear.restart_reason() == ""


def test_a_failed_trial_is_no_base_for_memory_of_torch() -> None:
    wear = Wear()
    wear.record(0, dataclasses.replace(BASE, pinned_bytes=10**9, failed=True))
    assert wear.restart_reason().startswith("rank 0 holds 1,000,000,000 bytes of pinned memory")


def test_a_process_tells_what_it_holds() -> None:
    for _ in range(10):
        before = process_usage()
        assert before is not None
        opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
        after = process_usage()
        for descriptor in opened:
            os.close(descriptor)
        assert after is not None
        if after.descriptors == before.descriptors + 3:  # else another test's thread has opened or closed something too
            break
    assert after.descriptors == before.descriptors + 3
    assert after.resident_bytes > 2**20
