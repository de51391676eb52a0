"""Notices what holds up an event loop: a callback that computes for long, while every other request waits.

CPU seconds of the loop's own thread count, not the clock's: beside other work on a busy machine any callback takes long by the
clock. Where there is more work than processors, CPU time grows too (caches emptied by others, time taken by a hypervisor), and
the limit with it. Garbage collection is left out: in a process of tests there is far more to look through than in a service,
which sets aside what it has imported.

The limit of `make nightly` is 50 ms; that of other runs is coarse, because a busy machine must fail no test.
"""

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

LIMIT_SECONDS = float(os.environ.get("AUTOTUNE_STALL_SECONDS", "0.5"))


def limit_now() -> float:
    """The limit, times the work that waits for each processor of this machine, where that is more than one."""
    return LIMIT_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@contextmanager
def noticed_stalls() -> Iterator[list[str]]:
    """A list of the callbacks of all asyncio loops of this process that computed for longer, as it grows."""
    found: list[str] = []
    collecting: dict[str, float] = {"began": 0.0, "seconds": 0.0}
    run = asyncio.Handle._run

    def collected(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            collecting["began"] = time.thread_time()
        else:
            collecting["seconds"] += time.thread_time() - collecting["began"]

    def timed(handle: Any) -> None:
        began, before = time.thread_time(), collecting["seconds"]
        shown = _shown(handle)  # before: a task that has ended does not say where it was
        try:
            run(handle)
        finally:
            seconds = time.thread_time() - began - (collecting["seconds"] - before)
            if seconds > LIMIT_SECONDS and seconds > limit_now():
                found.append(f"{seconds * 1e3:.0f} ms in {shown()}")

    gc.callbacks.append(collected)
    try:
        with patch.object(asyncio.Handle, "_run", timed):
            yield found
    finally:
        gc.callbacks.remove(collected)


def _shown(handle: Any) -> Any:
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    return lambda: repr(task if task is not None else callback)[:500]
