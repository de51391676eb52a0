"""The command line. `autotune --help` loads none of torch, ray, sqlalchemy, optuna and fastapi."""

import importlib
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
"""The folder of our packages."""


def bind_own_packages(*packages: str) -> None:
    """Import our packages before anything else on `sys.path` can take their names.

    Users may have packages named `storage` or `executor` too, which may come first on PYTHONPATH. Once a package is imported,
    its sub-modules are found through it. User code is imported only in rank processes.
    """
    sys.path.insert(0, ROOT)
    try:
        for package in packages:
            importlib.import_module(package)
    finally:
        sys.path.remove(ROOT)


def main() -> None:
    """The `autotune` command."""
    bind_own_packages("search_spaces", "storage", "executor")
    from autotune.cli.app import run

    sys.exit(run())
