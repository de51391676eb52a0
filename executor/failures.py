"""The failure table as it comes with the package, and with a user's rows. Imports no torch: the search reads it too."""

import tomllib
from functools import lru_cache
from pathlib import Path

from search_spaces.failure import FailureRow, FailureTable, rows_from

FILE = Path(__file__).with_suffix(".toml")


def failure_table(rows: tuple[FailureRow, ...] = ()) -> FailureTable:
    """The table, with a user's `rows` in it."""
    return _SHIPPED if not rows else _extended(rows)


@lru_cache(16)
def _extended(rows: tuple[FailureRow, ...]) -> FailureTable:
    return _SHIPPED.with_rows(rows)


# Read when this module is imported: a rank imports all of ours at its start, and nothing after that.
_SHIPPED = FailureTable(rows_from(tomllib.loads(FILE.read_text(encoding="utf-8")), FailureTable(())))
