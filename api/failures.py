"""A submitted row of the failure table."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.fields import Integer
from search_spaces.failure import LONGEST_PATTERN, MOST_PATTERNS

RowName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")]
_Word = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_]+$")]
_Pattern = Annotated[str, Field(min_length=1, max_length=LONGEST_PATTERN, pattern=r"^[^\x00]*$")]
_Words = Annotated[list[_Word], Field(max_length=100, fail_fast=True)]
_Patterns = Annotated[list[_Pattern], Field(max_length=MOST_PATTERNS, fail_fast=True)]


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
