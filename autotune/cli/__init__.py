"""The command line. `autotune --help` loads none of torch, ray, sqlalchemy, optuna and fastapi."""

import sys

from autotune.cli.own_packages import bind_own_packages


def main() -> None:
    """The `autotune` command."""
    bind_own_packages("search_spaces", "storage", "executor")
    from autotune.cli.app import run

    sys.exit(run())
