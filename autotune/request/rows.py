"""Requests from and to plain data: fields of a TOML file or an HTTP body, a job's row, a best-config file."""

import dataclasses
import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import JobNotResumableError, RequestError
from autotune.question.assumption import Assumption
from autotune.request.checks import ENVIRONMENT_SETTINGS
from autotune.request.field_forms import read_lengths, read_loads, with_command, with_load_rows
from autotune.request.job_fields import FIELDS, Objective
from autotune.request.request import JobRequest
from executor.errors import failure_table
from search_spaces.errors import SearchSpaceError
from search_spaces.failure import FailureRow, require_small, rows_from
from search_spaces.file_kinds import REQUEST_FILE, mistaken
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Fidelity
from storage.records import JobRecord

SERIES = ("cost", "devices", "sequence", "scale")
"""Objectives of `autotune.series`, not of a single job."""


def request_from_fields(fields: Mapping[str, Any]) -> JobRequest:
    """Return a request from plain values by field names, as in a file or an HTTP body.

    Raises:
        RequestError: a field is unknown (the message names the closest), has a value of the wrong type, or `model` is missing.
        ModelFormatError: a field of `command` is invalid.
        FailureTableError: a row of `failures` is invalid.
    """
    for name in fields:
        if name not in FIELDS:
            raise RequestError(name, "is not a field of a request", nearest_field(name))
    fields = with_load_rows(with_failures(with_command(fields)))
    for name in (ENVIRONMENT_SETTINGS, "tags", "goodput", "trackers"):
        if isinstance(fields.get(name), str):  # a single string, which tuple() would split into letters
            fields = {**fields, name: (fields[name],)}
    fidelity = fields.get("fidelity", {})
    fidelity_fields = [item.name for item in dataclasses.fields(Fidelity)]
    if not isinstance(fidelity, Mapping) or not set(fidelity) <= set(fidelity_fields):
        raise RequestError("fidelity", f"{fidelity!r} is not known", f"give a table of some of {', '.join(fidelity_fields)}")
    if fields.get("objective") in SERIES:
        problem = f"{fields['objective']} is a series of jobs of several sizes, not one job"
        raise RequestError("objective", problem, "run it with `autotune sweep` or `autotune.tune_series`")
    if fields.get("objective", Objective.THROUGHPUT) not in list(Objective):
        remedy = f"use one of {', '.join(Objective)}; sweeps also take {', '.join(SERIES)}"
        raise RequestError("objective", f"{fields['objective']!r} is not known", remedy)
    if fields.get("ray_address") is not None:
        fields = {"cluster": "ray", **fields}
    unstated = tuple(name for name in ("global_batch_size", "sequence_length") if name not in fields)
    fields = {**fields, "resolved_defaults": unstated}
    if "model" not in fields:
        raise RequestError("model", "is missing", "give a preset, a config.json or module:factory, or a command")
    try:
        return from_plain(JobRequest, fields)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, RequestError | SearchSpaceError):
            raise
        raise RequestError("request", str(error), "give each field a value of its type") from error


def request_from_row(row: Mapping[str, Any]) -> JobRequest:
    """Return the request in a job's row or a best-config file.

    Raises:
        JobNotResumableError: this version cannot read it.
    """
    try:
        return from_plain(JobRequest, row)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        problem = f"its request cannot be read by this version ({error})"
        raise JobNotResumableError("job", problem, "resume it with the version that opened it") from error


def assumed_of_row(row: Mapping[str, Any]) -> tuple[Assumption, ...]:
    """What nobody stated when the job of this row was opened; empty also if it cannot be read."""
    try:
        return tuple(from_plain(Assumption, item) for item in row.get("resolved_assumed", ()))
    except (TypeError, ValueError, AttributeError, LookupError):
        return ()


def request_of(job: JobRecord) -> JobRequest:
    """Return the request of a job.

    Raises:
        JobNotResumableError: its row is damaged, or this version cannot read it.
    """
    if job.damage:
        problem = f"{job.id} is damaged ({job.damage})"
        raise JobNotResumableError("job", problem, "see `autotune db check`, and restore it from a backup")
    return request_from_row(job.request)


def request_to_row(request: JobRequest) -> dict[str, Any]:
    """Return the request as plain data for a job's row."""
    plain: dict[str, Any] = to_plain(request)
    return plain


def nearest_field(name: str) -> str:
    """The remedy for an unknown field."""
    matches = difflib.get_close_matches(name, FIELDS, n=1)
    return f"did you mean {matches[0]}?" if matches else f"the fields are {', '.join(FIELDS)}"


READERS: Mapping[str, Callable[[str, Path], Any]] = {
    "failures": lambda name, folder: read_failures(folder / name),
    "document_lengths": read_lengths,
    "expert_loads": read_loads,
    "knowledge": lambda name, folder: str(folder / name) if (folder / name).exists() else name,
}
"""Field -> parser of its text, which may be the name of a file in a folder."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the fields of the file by their names; hyphens may replace underscores.

    Raises:
        RequestError: the file cannot be read, or a field is unknown or given twice.
        FailureTableError: a row of `failures`, here or in a referenced file, is invalid.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("config", f"{path} cannot be read ({error.strerror})", "give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        if other := mistaken(path, REQUEST_FILE):
            raise RequestError("config", f"{path} {other}", "give a TOML file of fields of a request") from error
        raise RequestError("config", f"{path} is not TOML ({error})", "correct the file") from error
    fields: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in fields:
            raise RequestError(key, f"is given twice in {path}", "leave one of them out")
        fields[name] = value
    for name, value in fields.items():
        if name not in FIELDS and (other := mistaken(path, REQUEST_FILE)):
            raise RequestError("config", f"{path} {other}", "give a TOML file of fields of a request")
        if name not in FIELDS:
            raise RequestError(name, f"is not a field of a request ({path})", nearest_field(name))
        if name in READERS and isinstance(value, str):
            fields[name] = READERS[name](value, path.parent)
    return fields


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
