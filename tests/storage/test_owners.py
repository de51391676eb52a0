"""Telling a dead process from a live one."""

import dataclasses
import os
import subprocess
import sys

import pytest

from storage import owners
from storage.owners import current_owner, is_dead
from storage.records import Owner


def test_this_process_lives() -> None:
    assert not is_dead(current_owner())
    assert current_owner() == current_owner()


def test_nothing_is_known_of_another_host() -> None:
    assert not is_dead(Owner(host="elsewhere", pid=2**22 + 1, started=1.0))


def test_a_process_that_ended_is_dead_before_it_is_reaped_and_after() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    ended = dataclasses.replace(current_owner(), pid=process.pid, started=0.0)
    assert process.stdout is not None
    process.stdout.read()  # to its end: the process exits
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert is_dead(ended)
    process.communicate()
    assert is_dead(ended)


def test_a_pid_that_another_process_has_now() -> None:
    assert is_dead(dataclasses.replace(current_owner(), started=current_owner().started - 1))
    assert not is_dead(dataclasses.replace(current_owner(), started=0.0))


def test_a_process_that_the_system_hides_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = current_owner()
    monkeypatch.setattr(owners, "_look_up", lambda pid: None)
    assert not is_dead(owner)


def test_the_same_name_in_another_container_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = current_owner()
    monkeypatch.setattr(owners, "_INITIAL_PID_NAMESPACE", "pid:[1]")
    assert current_owner().host != owner.host or "/" in owner.host
