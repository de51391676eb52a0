"""Field types that several request bodies share."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema

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


class Body(BaseModel):
    """A body with fixed fields."""

    model_config = ConfigDict(extra="forbid", strict=True)
