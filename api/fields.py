"""Types of fields that several bodies have."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from search_spaces.documents import MOST_DOCUMENTS


def _whole(value: object) -> object:
    """5.0 is an integer to JSON Schema, as it is to a client whose language has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
DocumentLengths = Annotated[list[Annotated[Integer, Field(ge=1, le=2**32)]], Field(max_length=MOST_DOCUMENTS)]
