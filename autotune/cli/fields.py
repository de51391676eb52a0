"""The fields of a question from a command line, and for a tuning request also from a file."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.cli.status import print_note
from autotune.installed import has
from autotune.request.field_forms import read_lengths, read_loads
from autotune.request.rows import read_config_file, read_failures
from autotune.session.baselines import read_baseline
from search_spaces.errors import ModelFormatError
from search_spaces.models.huggingface import BUILT, is_factory_reference, read_model_config
from search_spaces.spaces import parse_pins


def model_reference(text: str) -> str:
    """The model, or `hf:TEXT`, Hugging Face's own module, for a config.json of a family that this package does not describe."""
    path = Path(text).expanduser()
    if is_factory_reference(text) or not path.exists() or not has("transformers"):
        return text
    try:
        read_model_config(path)
    except ModelFormatError as error:
        if BUILT in error.remedy:
            print_note(f"{error.field}: {error.problem}; Hugging Face's own module of it is taken ({BUILT}{text})")
            return f"{BUILT}{text}"
    return text


READERS: Mapping[str, Callable[[Any], Any]] = {
    "model": model_reference,
    "pins": parse_pins,
    "failures": read_failures,
    "document_lengths": read_lengths,
    "expert_loads": read_loads,
    "baseline": read_baseline,
    "data_path": str,
    **dict.fromkeys(("lora_targets", "methods", "cards"), lambda text: tuple(part.strip() for part in text.split(","))),
}
"""Field -> parser of its option."""


def read_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields from those of their options.

    Raises:
        RequestError, SearchSpaceError: a file cannot be read, or a knob or its value does not exist.
    """
    values = {name: READERS[name](value) if name in READERS else value for name, value in options.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def request_fields(options: Mapping[str, Any], config: Path | None) -> dict[str, Any]:
    """Return the fields of a request: those of a file, overridden by options. Raises as `read_fields` and for the file."""
    of_file, given = read_config_file(config) if config else {}, read_fields(options)
    return {**of_file, **given, "pins": {**of_file.get("pins", {}), **given.get("pins", {})}}


def with_import_folders(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with the search path of a `module:factory`."""
    if is_factory_reference(str(fields.get("model", ""))):
        fields.setdefault("python_path", import_folders())
    return fields


def import_folders() -> tuple[str, ...]:
    """The search path of a `module:factory`: the current folder, then PYTHONPATH, as with `python -m`."""
    further = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return (str(Path.cwd()), *(str(Path(folder).absolute()) for folder in further))
