"""The parent process of a user's script on one rank: starts it, forwards signals, and cleans up after it.

    rank                                      supervisor
      │ starts it with a JSON file ───────►      starts the script in a new process group
      │ ◄──────────────────── {"pid": …}         or {"failed": why}
      │ one letter: a signal ─────────────►      any number of times
      │ ◄──────────────────── {"exit": …}        the script and all its child processes have ended
      │ end of file ──────────────────────►      the rank is gone: kill everything, remove its folder and shared memory

The supervisor is not in the rank's process group: when a trial runs out of time, the rank is killed with its whole group, and
no process would be left to kill the script's children (data-loader workers, daemons in their own sessions). As a subreaper,
it adopts orphans among them. The script dies with this process.

This file imports only the standard library and is started by its path with `-I -S`, which takes about 20 ms.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIGNALS = {b"a": signal.SIGABRT, b"k": signal.SIGKILL}
"""Letter -> signal to the script. SIGABRT goes only to its own process, which then prints its stack traces (faulthandler)."""
POLL_SECONDS = 0.02
KILL_SECONDS = 5.0
"""Maximum wait for killed processes to end."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run the script that the JSON file describes, until it ends or the rank is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the main program, which ends its ranks
    launch = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        script = _start(launch)
    except (OSError, subprocess.SubprocessError) as error:
        _send({"failed": f"{launch['words'][0]} cannot be started in {launch['folder'] or Path.cwd()}: {error}"})
        return
    _send({"pid": script.pid})
    ended = _watch(script.pid)
    kill_rest(script.pid)
    if ended is None:
        shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
        if pattern := launch["shared_memory"]:
            for path in Path(pattern).parent.glob(Path(pattern).name):
                path.unlink(missing_ok=True)
    else:
        _send(ended)


def _start(launch: dict[str, Any]) -> "subprocess.Popen[bytes]":
    def prepare_child() -> None:
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if launch["data_limit"] is not None:
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            bound = launch["data_limit"] if hard == resource.RLIM_INFINITY else min(launch["data_limit"], hard)
            resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))

    with Path(launch["output"]).open("ab", buffering=0) as output:
        return subprocess.Popen(
            launch["words"],
            cwd=launch["folder"] or None,
            env=launch["environment"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=prepare_child,
        )


def _watch(pid: int) -> dict[str, Any] | None:
    """Forward signals until the script ends; return how it ended, or None if the rank is gone."""
    while True:
        ended_pid, status, usage = os.wait4(pid, os.WNOHANG)
        if ended_pid:
            return {"exit": os.waitstatus_to_exitcode(status), "peak_bytes": usage.ru_maxrss * 1024}
        if select.select([0], [], [], POLL_SECONDS)[0]:
            letter = os.read(0, 1)
            if not letter:
                return None
            with contextlib.suppress(ProcessLookupError):
                (os.kill if letter == b"a" else os.killpg)(pid, SIGNALS[letter])


def kill_rest(group: int) -> None:
    """Kill what is left of the script: its group, and its other descendants, which are now children of this process."""
    until = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    while (children := _children(os.getpid())) and time.monotonic() < until:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _children(parent: int) -> list[int]:
    children = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(entry.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                children.append(int(entry.parent.name))
    return children


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _send(message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
