"""Field types that several request bodies share."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from autotune.request.field_names import OLD_NAMES, with_present_names
from autotune.request.sizes import parse_size
from search_spaces.training.documents import MOST_DOCUMENTS
from search_spaces.training.expert_loads import MOST as MOST_LOADS

MOST_BYTES = 2**53


def _whole(value: object) -> object:
    """Accept 5.0 as an integer, as JSON Schema does: some client languages have only one number type."""
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
"""Bytes as a number, or text with a unit."""
Load = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
ExpertLoads = Annotated[
    list[Annotated[list[Load], Field(max_length=MOST_LOADS, fail_fast=True)]], Field(max_length=MOST_LOADS, fail_fast=True)
]
DocumentLengths = Annotated[list[Annotated[Integer, Field(ge=1, le=2**32)]], Field(max_length=MOST_DOCUMENTS, fail_fast=True)]


def _with_old_names(schema: dict[str, Any]) -> None:
    """Describe the old names that a body accepts, as deprecated properties."""
    properties = schema["properties"]
    for old, new in OLD_NAMES.items():
        if new in properties:
            properties[old] = {**properties[new], "deprecated": True, "description": f"Old name of `{new}`: give one of them."}


class Body(BaseModel):
    """A body with fixed fields. It also accepts their old names; then `api.guard` adds a deprecation header."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_with_old_names)

    @model_validator(mode="before")
    @classmethod
    def _by_present_names(cls, given: Any) -> Any:
        return with_present_names(given) if isinstance(given, Mapping) else given
