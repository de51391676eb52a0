"""Writes and reads best-config documents as files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import BestConfigError
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_row
from search_spaces.file_kinds import BEST_CONFIG, mistaken

SCHEMA_VERSION = 1
GIVE = "give a best-config.json: a sweep writes one (--out), and so does `autotune export JOB`"
SCHEMA_PATH = Path(__file__).parents[1] / "schemas" / "best-config.schema.json"


def best_config_text(document: dict[str, Any]) -> str:
    """The file's text: keys in their order, an indent of two spaces, a final line end."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def read_best_config(path: Path) -> dict[str, Any]:
    """Return the document in the file.

    Raises:
        BestConfigError: the file cannot be read, is not a best-config, or has another schema version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BestConfigError(str(path), f"cannot be read ({error.strerror})", GIVE) from error
    except ValueError as error:
        problem = mistaken(path, BEST_CONFIG) or f"is not JSON ({error})"
        raise BestConfigError(str(path), problem, GIVE) from error
    if not isinstance(document, dict) or document.get("schema_version") is None:
        raise BestConfigError(str(path), mistaken(path, BEST_CONFIG) or f"is not {BEST_CONFIG}", GIVE)
    require_schema_version(document, str(path))
    for key in ("job", "best"):
        if not isinstance(document.get(key), dict):
            raise BestConfigError(str(path), f"lacks {key}", "write it again with `autotune export`")
    return dict(document)


def require_schema_version(document: Mapping[str, Any], source: str) -> None:
    """Check that the document has this version's schema.

    Raises:
        BestConfigError: it has another one.
    """
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        problem = f"has schema version {version}, not {SCHEMA_VERSION}"
        raise BestConfigError(source, problem, "write it again with `autotune export`")


def request_of(document: Mapping[str, Any]) -> JobRequest:
    """The resolved request of the document's job: enough to run its best configuration again without a database.

    Raises:
        BestConfigError: this version cannot read it.
    """
    require_schema_version(document, "best-config")
    try:
        return request_from_row(document["job"]["request"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise BestConfigError("job.request", str(error), "write the file again with `autotune export`") from error


def require_measured(document: dict[str, Any], source: str) -> None:
    """Check that the best configuration is measured.

    Raises:
        BestConfigError: it was carried to another cluster, so that its rates are predicted.
    """
    if document["best"].get("measured") is None:
        problem = "nothing is measured: the file was carried to this cluster by predictions"
        raise BestConfigError(source, problem, "run `autotune sweep` there, with --from and this file")
