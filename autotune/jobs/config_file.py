"""A request as a TOML file: `autotune sweep --config sweep.toml`."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.jobs.documents_field import read_lengths
from autotune.jobs.failures_field import read_failures
from autotune.jobs.request import FIELDS, nearest_field

OPTION_NAMES = {
    "seq_len": "sequence_length",
    "memory_limit": "memory_limit_bytes",
    "data": "data_path",
    "nvme": "nvme_path",
    "set": "pins",
    "for": "answer_for",
    "environment": "environment_settings",
    "tag": "tags",
}
"""Options of the command line whose field has another name; a file may use either."""
READERS: Mapping[str, Callable[[str, Path], Any]] = {
    "failures": lambda name, folder: read_failures(folder / name),
    "document_lengths": read_lengths,
}
"""Field -> what reads its text, which may be a file's name, in a folder."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the fields that the file gives, by the request's own names; hyphens may stand for underscores.

    Raises:
        RequestError: the file cannot be read, or a field is unknown or given twice.
        FailureTableError: a row of `failures`, here or in a file beside this one, has no meaning.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("config", f"{path} cannot be read ({error.strerror})", "give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError("config", f"{path} is not TOML ({error})", "correct the file") from error
    fields: dict[str, Any] = {}
    for key, value in content.items():
        name = OPTION_NAMES.get(key.replace("-", "_"), key.replace("-", "_"))
        if name not in FIELDS:
            raise RequestError(key, f"is not a field of a request ({path})", nearest_field(name))
        if name in fields:
            raise RequestError(key, f"is given twice in {path}", "leave one of them out")
        fields[name] = READERS[name](value, path.parent) if name in READERS and isinstance(value, str) else value
    return fields
