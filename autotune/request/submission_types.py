"""Generate `autotune/client/submission_fields.py`: the fields of a submission as a TypedDict, for editors.

    python -m autotune.request.submission_types

A test compares the file with the generated text.
"""

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from autotune.request.field import SERVICE, RequestField
from autotune.request.request import JobRequest

FILE = Path(__file__).parents[1] / "client" / "submission_fields.py"
TYPES = {
    "pins": "Mapping[str, KnobValue | Sequence[KnobValue]] | None",
    "command": "Mapping[str, Any] | None",
    "document_lengths": "Sequence[int] | None",
    "memory_limit": "int | str | None",
    "baseline": "Mapping[str, KnobValue] | None",
    "failures": "Mapping[str, Mapping[str, Any]] | None",
    "environment_settings": "Sequence[str] | None",
    "tags": "Sequence[str] | None",
}
"""Fields whose type differs from that of the request."""
HEAD = '''"""The fields of a submission. Written by `python -m autotune.request.submission_types`; do not edit."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

KnobValue = bool | int | float | str


class SubmissionFields(TypedDict, total=False):
    """Budget and search settings of a job. Fields that are omitted or None have the default of `autotune sweep`."""

'''
TAIL = '''    priority: int
    """Jobs with higher priority run first; between -100 and 100."""
'''


def submission_types() -> str:
    """The text of the generated file."""
    lines = [HEAD]
    for item in dataclasses.fields(JobRequest):
        declared: RequestField | None = item.metadata.get("request")
        if declared is None or not declared.service or item.name == "model":
            continue
        kind = TYPES.get(item.name) or _optional(item.type)
        help_lines = textwrap.wrap(f'"""{declared.help_of(SERVICE)}"""', width=120, break_long_words=False)
        lines.append(f"    {item.name}: {kind}\n" + "".join(f"    {line}\n" for line in help_lines))
    return "".join([*lines, TAIL])


def _optional(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    text = "str" if text == "Objective" else text
    return text if text.endswith("| None") else f"{text} | None"


if __name__ == "__main__":
    FILE.write_text(submission_types(), encoding="utf-8")
