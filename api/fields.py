"""Types of fields that several bodies have."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from autotune.request.field_names import OLD_NAMES, with_present_names
from autotune.request.sizes import parse_size
from search_spaces.documents import MOST_DOCUMENTS

MOST_BYTES = 2**53


def _whole(value: object) -> object:
    """5.0 is an integer to JSON Schema, as it is to a client whose language has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: object, info: ValidationInfo) -> object:
    return parse_size(str(info.field_name), value) if isinstance(value, str) else value


Integer = Annotated[int, BeforeValidator(_whole)]
Size = Annotated[
    Integer,
    BeforeValidator(_bytes),
    Field(ge=1, le=MOST_BYTES),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_BYTES}, {"type": "string", "maxLength": 40}]}),
]
"""Bytes, or text with a unit."""
DocumentLengths = Annotated[list[Annotated[Integer, Field(ge=1, le=2**32)]], Field(max_length=MOST_DOCUMENTS, fail_fast=True)]


def _with_old_names(schema: dict[str, Any]) -> None:
    """Describe the old names that a body accepts, as deprecated properties."""
    properties = schema["properties"]
    for old, new in OLD_NAMES.items():
        if new in properties:
            properties[old] = {**properties[new], "deprecated": True, "description": f"Old name of `{new}`: give one of them."}


class Body(BaseModel):
    """A body of fields with a fixed vocabulary; their old names are accepted too (`api.guard` adds a header that says so)."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_with_old_names)

    @model_validator(mode="before")
    @classmethod
    def _by_present_names(cls, given: Any) -> Any:
        return with_present_names(given) if isinstance(given, Mapping) else given
