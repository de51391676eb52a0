"""Commands that a submission may run on the server's machines: only those that the server was started with."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.fields import Integer
from autotune.session.allowed import AllowList

Word = Annotated[str, Field(max_length=300, pattern=r"^[^\x00]*$")]
Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f]*$")]
OwnName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Values = Annotated[list[Annotated[str, Field(min_length=1, max_length=60)]], Field(min_length=1, max_length=20)]


class SubmittedCommand(BaseModel):
    """A training script on the server, with placeholders. Its first words and folder must match an allowed command."""

    model_config = ConfigDict(extra="forbid", strict=True)

    arguments: Annotated[list[Word], Field(min_length=1, max_length=100)]
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
    script_knobs: Annotated[dict[OwnName, Values], Field(max_length=10)] = {}
    environment_knobs: Annotated[dict[OwnName, Values], Field(max_length=10)] = {}
    report_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None


def allowed_command(command: SubmittedCommand, allowed: AllowList) -> dict[str, Any]:
    """The command in the form that a request has.

    Raises:
        RequestError: the server does not allow it.
        ModelFormatError: a field has an invalid value.
    """
    fields = command.model_dump(exclude_none=True) | {"folder": command.folder.rstrip("/") or "/"}
    allowed.require_words(command.folder, command.arguments, command.environment_knobs)
    return fields
