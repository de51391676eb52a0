"""Parse the field `failures` of a request, the user's rows of the failure table, in its different forms."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from executor.failures import failure_table
from search_spaces.failure import FailureRow, require_small, rows_from
from search_spaces.file_kinds import mistaken
from search_spaces.plain import to_plain


def read_failures(path: Path) -> dict[str, Any]:
    """The rows of a file as plain tables: name -> fields. The rows are validated.

    Raises:
        RequestError: the file cannot be read, or is not TOML.
        FailureTableError: a row is invalid; the message names row and field.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("failures", f"{path} cannot be read ({error.strerror})", "give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problem = mistaken(path, "a failure table") or f"is not TOML ({error})"
        raise RequestError("failures", f"{path} {problem}", "correct the file; docs/failures.md has one") from error
    rows_from(tables, failure_table())
    return tables


def with_failures(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the rows in the form of a request: a list, each row with all its fields.

    Raises:
        RequestError: they are not rows.
        FailureTableError: a row is invalid; the message names row and field.
    """
    table = fields.get("failures")
    if table is None:
        return dict(fields)
    if isinstance(table, Mapping):
        rows: Any = rows_from(table, failure_table())
    elif isinstance(table, list | tuple) and all(isinstance(row, FailureRow) for row in table):
        require_small(table)
        rows = table
    else:
        raise RequestError(
            "failures", f"{table!r} is not a table of rows", "give {ROW: {FIELD: value}}, or --failures FILE.toml"
        )
    return {**fields, "failures": to_plain(rows)}
