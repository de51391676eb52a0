"""A request as a TOML file: `autotune sweep --config sweep.toml`."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.request.documents_field import read_lengths
from autotune.request.failures_field import read_failures
from autotune.request.loads_field import read_loads
from autotune.request.request import FIELDS
from autotune.request.rows import nearest_field
from search_spaces.file_kinds import REQUEST_FILE, mistaken

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
