"""A rank's loop on its pipe: what is told before what, and how a rank that waits is made to end."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from runner_contract import request_for

from executor.engine import RankContext
from executor.measurement.device import COUNTERS, DeviceCounters
from executor.runners import rank_loop
from executor.runners.rank_loop import RankLoop
from executor.runners.transport import Message, decode, encode
from search_spaces.plain import to_plain

CPU = torch.device("cpu")
Run = Callable[..., Any]


class Parent:
    """Holds the other end of the pipe of a loop that has joined, and knows what the loop's trial does."""

    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.run: Run = lambda *_: None
        self.loop = RankLoop(theirs, lambda *given: self.run(*given))
        self._thread = threading.Thread(target=self.loop.serve)
        self._thread.start()
        assert self.hear("ready")["driver_devices"] == 0
        self.send({"kind": "join"})
        self.hear("joined")

    def send(self, message: Message) -> None:
        self.connection.send_bytes(encode(message))

    def ask(self, attempt: str, run: Run) -> None:
        self.run = run
        self.send({"kind": "run", "request": to_plain(request_for(attempt=attempt))})

    def hear(self, kind: str) -> Message:
        while (message := decode(self.connection.recv_bytes()))["kind"] == "beat":
            pass
        assert message["kind"] == kind, message
        return message

    def close(self) -> None:
        self.connection.close()
        self._thread.join()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the rank does to its process groups and caches, in order."""
    done: list[str] = []
    monkeypatch.setattr(rank_loop, "join", lambda message, _: RankContext(rank=0, world_size=1, device=CPU))
    monkeypatch.setattr(rank_loop, "abort", lambda: done.append("abort"))

    class Substitute(DeviceCounters):
        def release(self) -> None:
            done.append("release")

        def reserved_bytes(self) -> int:
            return 5 if done[-1] == "release" else 50

        def pinned_bytes(self) -> int:
            return 7 if done[-1] == "release" else 70

    monkeypatch.setitem(COUNTERS, "cpu", Substitute)
    return done


@pytest.fixture
def parent(log: list[str]) -> Iterator[Parent]:
    parent = Parent()
    yield parent
    parent.close()


def test_a_failure_is_told_before_anything_that_may_wait(parent: Parent, log: list[str]) -> None:
    told = threading.Event()

    def leave() -> None:
        log.append("leave")
        told.wait()  # until the parent has heard of the failure

    def fail(context: RankContext, *_: object) -> None:
        context.after_failure.callback(leave)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    parent.ask("first", fail)
    assert parent.hear("failure")["outcome"] == "INFEASIBLE"
    told.set()
    rest = parent.hear("rested")["rest"]
    assert log == ["abort", "leave", "release"]
    assert (rest["reserved_bytes"], rest["pinned_bytes"], rest["failed"]) == (5, 7, True)
    parent.ask("second", fail)  # it has left its groups
    assert parent.hear("failure")["message"] == "ConnectionError: this rank has not joined its gang"
    parent.hear("rested")


def test_a_rank_that_waits_for_one_that_failed_is_made_to_end(
    parent: Parent, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(rank_loop, "abort", ended.set)

    def wait(*_: object) -> None:
        waits.set()
        ended.wait()
        raise ValueError("Default process group has not been initialized")

    parent.ask("first", wait)
    waits.wait()
    parent.send({"kind": "abort", "attempt": "another"})
    parent.send({"kind": "abort", "attempt": "first"})
    failure = parent.hear("failure")
    assert (failure["outcome"], failure["collective"]) == ("FAILED", True), "a consequence, whatever it says"
    parent.hear("rested")


def test_a_rank_that_another_ones_failure_overtakes_does_not_begin(parent: Parent) -> None:
    parent.send({"kind": "abort", "attempt": "first"})
    parent.ask("first", lambda *_: pytest.fail("it began"))
    failure = parent.hear("failure")
    assert (failure["message"], failure["collective"]) == (
        "ConnectionAbortedError: another rank failed before this one began", True,
    )  # fmt: skip
    parent.hear("rested")
