"""The command line. `autotune --help` loads none of torch, ray, sqlalchemy, optuna and fastapi."""

import importlib
import sys
from pathlib import Path

ROOMS = ("search_spaces", "storage", "executor")


def main() -> None:
    """The `autotune` command."""
    _bind_own_rooms()
    from autotune.cli.app import run

    sys.exit(run())


def _bind_own_rooms() -> None:
    """Import our own rooms before anything else on `sys.path` can take their names.

    People have packages named `storage` or `executor` too, and theirs may come first on PYTHONPATH. Once bound, the
    sub-modules of a room are found through the room itself. User code is imported in rank processes alone.
    """
    root = str(Path(__file__).resolve().parents[2])
    sys.path.insert(0, root)
    try:
        for room in ROOMS:
            importlib.import_module(room)
    finally:
        sys.path.remove(root)
