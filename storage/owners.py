"""Identify processes that own jobs, and detect dead ones."""

import os
import socket
from pathlib import Path

from storage.records import Owner

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Linux's name for the process-id namespace of the machine itself (PROC_PID_INIT_INO)."""


def current_owner() -> Owner:
    """Return this process as an owner of jobs."""
    process = _look_up(os.getpid())
    return Owner(host=_host(), pid=os.getpid(), started=process[1] if process else 0.0)


def is_dead(owner: Owner) -> bool:
    """Whether `owner` is certainly dead: a process of this host that ended, or whose pid now belongs to another process.

    False for a process of another host, whose state is unknown here.
    """
    if owner.host != _host():
        return False
    if not _exists(owner.pid):
        return True
    process = _look_up(owner.pid)
    if process is None:
        return False
    state, started = process
    # Z and X: the process has ended, and its parent has not collected its exit status.
    return state in ("Z", "X") or (owner.started != 0.0 and abs(started - owner.started) > 0.005)


def _host() -> str:
    """The host name, with the process-id namespace if that is not the machine's own.

    Containers may share a host name and a database file but not their process ids: a pid that is free here can be a live
    holder there.
    """
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()
    return socket.gethostname() if namespace == _INITIAL_PID_NAMESPACE else f"{socket.gethostname()}/{namespace}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _look_up(pid: int) -> tuple[str, float] | None:
    """Return the state of a process and the seconds from boot to its start; None if /proc is missing or hides it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may contain spaces and parentheses: the fields are counted after the last parenthesis.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")
