"""Generate the files that repeat what request fields declare, for readers that must not import the declarations.

    python -m autotune.request.generated

- `autotune/client/submission_fields.py`: the fields of a submission as a TypedDict, for editors.
- `autotune/request/further_fields.py`: the same for what `autotune.tune` takes beside its own parameters.
- `autotune/cli/request_fields.json`: the options of commands, because the help of a command must appear at once.

A test compares the files with the generated texts.
"""

import dataclasses
import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.request.field import ONE_AT_A_TIME, SERVICE, FieldOption, RequestField
from autotune.request.request import JobRequest, declared_fields, plain_type

TYPES = {
    "pins": "Mapping[str, KnobValue | Sequence[KnobValue]] | None",
    "command": "Mapping[str, Any] | None",
    "document_lengths": "Sequence[int] | None",
    "expert_loads": "Sequence[Sequence[float]] | None",
    "knowledge": "Mapping[str, Any] | str | None",
    "fidelity": "Mapping[str, Any] | None",
    "memory_limit": "int | str | None",
    "baseline": "Mapping[str, KnobValue] | None",
    "failures": "Mapping[str, Mapping[str, Any]] | None",
    "environment_settings": "Sequence[str] | None",
    "tags": "Sequence[str] | None",
    "goodput": "Sequence[str] | None",
    "trackers": "Sequence[str] | None",
}
"""Fields whose type differs from that of the request."""
SUBMISSION = '''"""The fields of a submission. Written by `python -m autotune.request.generated`; do not edit."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

KnobValue = bool | int | float | str


class SubmissionFields(TypedDict, total=False):
    """Budget and search settings of a job. Fields that are omitted or None have the default of `autotune sweep`."""

'''
FURTHER = '''"""More fields of `autotune.tune`. Written by `python -m autotune.request.generated`; do not edit."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class FurtherFields(TypedDict, total=False):
    """Settings of a sweep beside the parameters of `autotune.tune`. Fields that are omitted or None have their defaults."""

'''
TUNE = (
    "model", "cluster", "ranks", "space", "trials", "strategy", "objective", "seed", "global_batch_size", "sequence_length",
    "memory_limit", "pins", "max_seconds", "trial_timeout", "data_path", "baseline", "runner", "ray_address", "python_path",
    "failures", "name", "tags", "note",
)  # fmt: skip
"""Parameters of `autotune.tune`; a test compares them with the function."""
TAIL = '''    priority: int
    """Jobs with higher priority run first; between -100 and 100."""
'''


def submission_types() -> str:
    """The text of the generated file."""
    return SUBMISSION + _typed_fields(lambda item, declared: declared.service and item.name != "model") + TAIL


def further_types() -> str:
    """The text of the generated file."""
    return FURTHER + _typed_fields(lambda item, _: item.name not in TUNE)


def _typed_fields(chosen: Callable[[dataclasses.Field[Any], RequestField], bool]) -> str:
    """The chosen fields with their types and helps, as the body of a TypedDict."""
    lines = []
    for item in dataclasses.fields(JobRequest):
        declared: RequestField | None = item.metadata.get("request")
        if declared is None or not chosen(item, declared):
            continue
        kind = TYPES.get(item.name) or _optional(item.type)
        help_lines = textwrap.wrap(f'"""{declared.help_of(SERVICE)}"""', width=120, break_long_words=False)
        lines.append(f"    {item.name}: {kind}\n" + "".join(f"    {line}\n" for line in help_lines))
    return "".join(lines)


KINDS = {
    "document_lengths": "text", "expert_loads": "text", "knowledge": "text", "failures": "path", "data_path": "path",
    "memory_limit": "bytes",
}  # fmt: skip
"""Fields whose option has another type than the field, because the command parses it."""
KIND_NAMES = {str: "text", int: "whole", float: "number", bool: "flag"}


def field_options() -> str:
    """The text of the generated file of options: the arguments of `FieldOption`s."""
    options = [
        FieldOption(
            name=name,
            kind=KINDS.get(name) or ("texts" if name in ONE_AT_A_TIME else KIND_NAMES[plain_type(kind)]),
            panel=declared.panel.value,
            unit=declared.unit,
            on=default is True,
            helps={command: _with_default(declared, default, command) for command in declared.commands},
        )
        for name, declared, kind, default in declared_fields()
        # The commands declare these options themselves: they are merged with a file's values in a special way.
        if declared.commands and name not in ("pins", "baseline")
    ]
    return json.dumps([option._asdict() for option in options], indent=1, ensure_ascii=False) + "\n"


def _with_default(declared: RequestField, default: Any, command: str) -> str:
    """The help, and ` [default: 20]` if there is a default worth showing."""
    text = declared.help_of(command)
    if "default" in text.lower() or default is False:
        return text
    default_text = f"{default:g}" if isinstance(default, float) else "" if default in (None, "", ()) else str(default)
    shown = (declared.shown_default or default_text).strip()
    return f"{text} [default: {shown}]" if shown else text


def _optional(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    text = "str" if text == "Objective" else text
    return text if text.endswith("| None") else f"{text} | None"


PACKAGE = Path(__file__).parents[1]
FILES: Mapping[Path, Callable[[], str]] = {
    PACKAGE / "client" / "submission_fields.py": submission_types,
    PACKAGE / "request" / "further_fields.py": further_types,
    PACKAGE / "cli" / "request_fields.json": field_options,
}
"""Generated file -> what generates its text."""

if __name__ == "__main__":
    for file, text in FILES.items():
        file.write_text(text(), encoding="utf-8")
