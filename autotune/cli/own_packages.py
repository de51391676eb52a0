"""Makes sure that our own packages are found under their names, whatever else is on `sys.path`."""

import importlib
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
"""The folder that holds our packages."""


def bind_own_packages(*packages: str) -> None:
    """Import our packages before anything else on `sys.path` can take their names.

    Users have packages named `storage` or `executor` too, and theirs may come first on PYTHONPATH. Once bound, sub-modules are
    found through the package itself. User code is imported in rank processes only.
    """
    sys.path.insert(0, ROOT)
    try:
        for package in packages:
            importlib.import_module(package)
    finally:
        sys.path.remove(ROOT)
