"""The fields of a tuning request from a command line: those of a file, overridden by options."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.request.failures_field import read_failures
from autotune.request.field_forms import read_lengths, read_loads
from autotune.request.rows import read_config_file
from autotune.session.baselines import read_baseline
from search_spaces.models.huggingface import is_factory_reference
from search_spaces.spaces import parse_pins


def request_fields(
    options: Mapping[str, Any], pins: tuple[str, ...], baseline: Path | None, config: Path | None
) -> dict[str, Any]:
    """Return the fields of a request.

    Raises:
        RequestError, SearchSpaceError: a file cannot be read, or a field, a knob or its value does not exist.
    """
    fields = {**(read_config_file(config) if config else {}), **options}
    fields["pins"] = {**fields.get("pins", {}), **parse_pins(pins)}
    if isinstance(fields.get("failures"), Path):
        fields["failures"] = read_failures(fields["failures"])
    if isinstance(fields.get("document_lengths"), str):
        fields["document_lengths"] = read_lengths(fields["document_lengths"])
    if isinstance(fields.get("expert_loads"), str):
        fields["expert_loads"] = read_loads(fields["expert_loads"])
    if baseline is not None:
        fields["baseline"] = read_baseline(baseline)
    return fields


def with_import_folders(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with the search path of a `module:factory`."""
    if is_factory_reference(str(fields.get("model", ""))):
        fields.setdefault("python_path", import_folders())
    return fields


def import_folders() -> tuple[str, ...]:
    """The search path of a `module:factory`: the current folder, then PYTHONPATH, as with `python -m`."""
    further = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return (str(Path.cwd()), *(str(Path(folder).absolute()) for folder in further))
