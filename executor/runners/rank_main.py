"""The program of a rank process. It is started by its file path, and stays clear of the user's modules.

A user's project may have packages named `api`, `storage` or `executor` too, and they may be first on PYTHONPATH. So:

1. Everything of ours that a rank needs is imported now, whatever `sys.path` says, by a finder for our names alone.
2. Then our packages leave `sys.modules` for good. Our functions keep working: they hold what they use.
3. The user's folders come first on `sys.path`, and our distribution's root, where it is there at all, last of those that
   hold code of ours (it stays, so that a user's `import autotune` finds the installed package).

From here on every import, at load or lazily, means the user's module. This file imports the standard library alone.
"""

import ctypes
import faulthandler
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = frozenset({"api", "autotune", "executor", "search_spaces", "storage"})
ROOT = str(Path(__file__).resolve().parents[2])
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class OurPackages(importlib.abc.MetaPathFinder):
    """Finds our packages in our own distribution, wherever that stands on `sys.path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the top-level packages; their submodules are found through their `__path__`."""
        del path, target
        return importlib.machinery.PathFinder.find_spec(fullname, [ROOT]) if fullname in PACKAGES else None


def load(trial_function: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import all of our code that a rank runs and forget its names; return the rank's loop and the trial function."""
    theirs = _forget_names()  # a user's sitecustomize may have imported packages of the same names already
    finder = OurPackages()
    sys.meta_path.insert(0, finder)
    try:
        loop = importlib.import_module("executor.runners.rank_loop").RankLoop
        for package in ("search_spaces", "executor"):
            _import_tree(package)
        module, _, name = trial_function.partition(":")
        run_trial = getattr(importlib.import_module(module), name)
    finally:
        sys.meta_path.remove(finder)
    _forget_names()
    sys.modules.update(theirs)
    return loop, run_trial


def _import_tree(name: str) -> None:
    """Import a module and all below it, but for the runners, whose part in a rank is already imported."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in PACKAGES:
            raise
        return  # an engine of others, whose distribution is not installed
    for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        if info.name != "executor.runners":
            _import_tree(info.name)


def _forget_names() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in PACKAGES}


def put_first(folders: Sequence[str]) -> None:
    """Put the user's folders first on `sys.path`. Our root goes behind all but the folders of installed packages."""
    rest = [entry for entry in sys.path if entry not in folders]
    if ROOT in rest and not ROOT.endswith(("site-packages", "dist-packages")):
        rest = [*(entry for entry in rest if entry != ROOT), ROOT]
    sys.path[:] = [*folders, *rest]
    importlib.invalidate_caches()


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before the request was made
        os._exit(1)


def adopt_orphans() -> None:
    """Have what daemonises below this process become its child, not init's: there it is found when the rank is ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> None:
    """Serve the parent on the inherited connection until it is gone."""
    descriptor, parent, trial_function, python_path = sys.argv[1:]
    die_with(int(parent))
    # Ctrl-C reaches every process of the terminal, but it is for the program that was started: that one ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # asks where a rank that hangs stands
    adopt_orphans()
    del sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    connection = Connection(int(descriptor))
    try:
        loop, run_trial = load(trial_function)
        put_first(json.loads(python_path))
    except BaseException as error:
        line = f"{type(error).__name__}: {error}"
        failure = {"kind": "failure", "outcome": "FAILED", "message": line, "traceback": traceback.format_exc()}
        connection.send_bytes(json.dumps(failure).encode())
        os._exit(1)
    loop(connection, run_trial).serve()
    # The parent is gone or wants this end: finalisers of a process group or of users' threads could wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
