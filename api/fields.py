"""Field types of request bodies: numbers, names, commands that the server allows, rows of the failure table."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema

from autotune.question.field import parse_length, parse_size
from search_spaces.failure import LONGEST_PATTERN, MOST_PATTERNS
from search_spaces.training.data_schedule import MOST_DOCUMENTS
from search_spaces.training.expert_loads import MOST as MOST_LOADS

MOST_BYTES = 2**53


def _whole(value: object) -> object:
    """Accept 5.0 as an integer, as JSON Schema does: some client languages have only one number type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _or_text(parse: Callable[[str, str], int]) -> BeforeValidator:
    """Read text with a unit. `parse`: of a field's name and its text."""

    def read(value: object, info: ValidationInfo) -> object:
        return parse(str(info.field_name), value) if isinstance(value, str) else value

    return BeforeValidator(read)


Integer = Annotated[int, BeforeValidator(_whole)]
Size = Annotated[
    Integer,
    _or_text(parse_size),
    Field(ge=1, le=MOST_BYTES),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_BYTES}, {"type": "string", "maxLength": 40}]}),
]
"""Bytes as a number, or text with a unit."""
Length = Annotated[
    Integer,
    _or_text(parse_length),
    Field(ge=1, le=2**32),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**32}, {"type": "string", "maxLength": 40}]}),
]
"""Tokens as a number, or text such as 8k."""
ExpertLoads = Annotated[
    list[
        Annotated[
            list[Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]], Field(max_length=MOST_LOADS, fail_fast=True)
        ]
    ],
    Field(max_length=MOST_LOADS, fail_fast=True),
]
DocumentLengths = Annotated[list[Annotated[Integer, Field(ge=1, le=2**32)]], Field(max_length=MOST_DOCUMENTS, fail_fast=True)]


class Body(BaseModel):
    """A body with fixed fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f]*$")]
OwnName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Values = Annotated[list[Annotated[str, Field(min_length=1, max_length=60)]], Field(min_length=1, max_length=20)]


class SubmittedCommand(BaseModel):
    """A training script on the server, with placeholders. Its first words and folder must match an allowed command."""

    model_config = ConfigDict(extra="forbid", strict=True)

    arguments: Annotated[
        list[Annotated[str, Field(max_length=300, pattern=r"^[^\x00]*$")]], Field(min_length=1, max_length=100)
    ]
    """The words of the command."""
    folder: Text
    """Its working directory."""
    launcher: Text = "torchrun"
    """torchrun, deepspeed or accelerate."""
    plugin: Annotated[str, Field(max_length=20)] = ""
    """With the launcher accelerate: deepspeed or fsdp."""
    parameter_count: Annotated[Integer, Field(ge=0, le=2**53)] = 0
    pattern: Text | None = None
    """Regular expression that extracts the rate from its log, with named groups."""
    trial_folder: Annotated[str, Field(max_length=20)] = "auto"
    """none (a trial runs in `folder`), link or copy."""
    template: Annotated[str, Field(max_length=100_000, pattern=r"^[^\x00]*$")] = ""
    """Text of a configuration file with placeholders; {template} in the command is its path."""
    template_name: Annotated[str, Field(max_length=100)] = ""
    """Name of that file, such as config.json."""
    script_knobs: Annotated[dict[OwnName, Values], Field(max_length=10)] = {}
    environment_knobs: Annotated[dict[OwnName, Values], Field(max_length=10)] = {}
    report_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None


RowName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")]
_Words = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_]+$")]], Field(max_length=100, fail_fast=True)
]
_Patterns = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=LONGEST_PATTERN, pattern=r"^[^\x00]*$")]],
    Field(max_length=MOST_PATTERNS, fail_fast=True),
]


class SubmittedRow(BaseModel):
    """How a failure is classified: see docs/failures.md. Omitted fields of a built-in row keep their values."""

    model_config = ConfigDict(extra="forbid", strict=True)

    outcome: Literal["INFEASIBLE", "FAILED", "TIMEOUT", "LOST", "PREEMPTED"] | None = None
    remedy: Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f]*$")] | None = None
    exceptions: _Words | None = None
    exit_codes: Annotated[list[Annotated[Integer, Field(ge=0, le=255)]], Field(max_length=100)] | None = None
    signals: _Words | None = None
    signs: _Words | None = None
    said: _Patterns | None = None
    message: _Patterns | None = None
    traceback: _Patterns | None = None
    output: _Patterns | None = None
    retries: Annotated[Integer, Field(ge=0, le=1000)] | None = None
    verify: bool | None = None
    quarantine: bool | None = None
    retire: bool | None = None
    consequence: bool | None = None
