"""Which rank processes are there."""

import time
from collections.abc import Callable
from pathlib import Path

from storage.store import open_store


def rank_processes(folder: str) -> list[int]:
    """Ids of rank processes whose working folder is `folder`: those that a command started there."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            here = (process / "cwd").readlink() == Path(folder).resolve()
            if here and b"rank_main.py" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended meanwhile, or is not ours
            continue
    return found


def ranks_are_gone(folder: Path) -> bool:
    """Whether they are, within seconds: the system kills them when their parent ends, which takes it a moment."""
    return _within(60.0, lambda: not rank_processes(str(folder)))


def a_trial_runs(database: Path) -> bool:
    """Whether an attempt at a trial of the latest job has begun, within seconds; ranks start before it."""

    def begun() -> bool:
        with open_store(str(database)) as store:
            return any(trial.attempts and trial.outcome is None for trial in store.trials.of(store.jobs.get().id))

    return _within(180.0, begun)


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
