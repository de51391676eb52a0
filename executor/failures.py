"""The failure table of the package, optionally extended by a user's rows. Does not import torch: the search reads it too."""

import tomllib
from functools import lru_cache
from pathlib import Path

from search_spaces.failure import FailureRow, FailureTable, rows_from


@lru_cache(16)
def failure_table(rows: tuple[FailureRow, ...] = ()) -> FailureTable:
    """Return the table, extended by a user's `rows`."""
    return _SHIPPED.with_rows(rows) if rows else _SHIPPED


# Read at import time: a rank imports all of our modules when it starts, and none later.
_SHIPPED = FailureTable(
    rows_from(tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")), FailureTable(()))
)
