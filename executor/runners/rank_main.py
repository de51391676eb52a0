"""The program of a rank process. It is started by its file path, and keeps our modules apart from the user's.

A user's project may also have packages named `api`, `storage` or `executor`, and they may be first on PYTHONPATH. Therefore:

1. All of our modules that a rank needs are imported now, independently of `sys.path`, by a finder for our names only.
2. Then our packages are removed from `sys.modules` for good. Our functions keep working, because they hold references.
3. The user's folders are put first on `sys.path`. Our distribution's root, if it is on `sys.path`, moves behind all other
   folders except those of installed packages. It stays so that a user's `import autotune` finds the installed package.

From then on every import, at load time or later, refers to the user's modules. This file imports only the standard library.
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


class OurPackages(importlib.abc.MetaPathFinder):
    """Finds our packages in our own distribution, wherever that is on `sys.path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the top-level packages; their submodules are found through `__path__`."""
        del path, target
        return importlib.machinery.PathFinder.find_spec(fullname, [ROOT]) if fullname in PACKAGES else None


def load(trial_function: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import all of our code that a rank runs and remove its names; return the rank's loop and the trial function."""
    theirs = _forget_names()  # a user's sitecustomize may have already imported packages with the same names
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
    """Import a module and all its submodules, except the runners, whose part in a rank is already imported."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in PACKAGES:
            raise
        return  # an engine whose third-party package is not installed
    for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        if info.name != "executor.runners":
            _import_tree(info.name)


def _forget_names() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in PACKAGES}


def put_first(folders: Sequence[str]) -> None:
    """Put the user's folders first on `sys.path`. Our root moves to the end unless it is a folder of installed packages."""
    entries = [entry for entry in sys.path if entry not in folders]
    if ROOT in entries and not ROOT.endswith(("site-packages", "dist-packages")):
        entries = [*(entry for entry in entries if entry != ROOT), ROOT]
    sys.path[:] = [*folders, *entries]
    importlib.invalidate_caches()


def die_with(parent: int) -> None:
    """Make the system kill this process when its parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent had already ended
        os._exit(1)


def main() -> None:
    """Serve the parent on the inherited connection until it is gone."""
    descriptor, parent, trial_function, python_path = sys.argv[1:]
    die_with(int(parent))
    # Ctrl-C reaches every process of the terminal, but only the main program should handle it: it ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # prints the stacks of a rank that hangs
    if sys.platform == "linux":
        # Daemonised descendants become children of this process instead of init's, so that they are found when it is ended.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
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
    # The parent has ended or requests the end. Finalisers of a process group or of users' threads could wait forever.
    os._exit(0)


if __name__ == "__main__":
    main()
