"""The command line. `autotune --help` loads none of torch, ray, sqlalchemy, optuna and fastapi."""

import importlib
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
"""Where our packages lie."""
ROOMS = ("search_spaces", "storage", "executor")


def main() -> None:
    """The `autotune` command."""
    bind_own_rooms(ROOMS)
    from autotune.cli.app import run

    sys.exit(run())


def bind_own_rooms(rooms: tuple[str, ...]) -> None:
    """Import our own rooms before anything else on `sys.path` can take their names.

    People have packages named `storage` or `executor` too, and theirs may come first on PYTHONPATH. Once bound, the
    sub-modules of a room are found through the room itself. User code is imported in rank processes alone.
    """
    sys.path.insert(0, ROOT)
    try:
        for room in rooms:
            importlib.import_module(room)
    finally:
        sys.path.remove(ROOT)
