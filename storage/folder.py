"""The default database. This module does not import SQLAlchemy, because commands use it before they need SQLAlchemy."""

import os
from pathlib import Path

from platformdirs import user_data_path


def default_file() -> Path:
    """The file in the user's data folder."""
    return user_data_path("autotune") / "autotune.db"


def has_default_database() -> bool:
    """Whether AUTOTUNE_DB names a database, or the default file exists. Creates nothing."""
    return bool(os.environ.get("AUTOTUNE_DB")) or default_file().exists()
