"""Commands that a submission may run on the server's machines: those that it was started with, and no others."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.fields import Integer
from autotune.errors import RequestError
from autotune.jobs.command_field import parse_allowed

SAFE_VARIABLES = frozenset({
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS",
    "NCCL_BUFFSIZE", "TORCH_NCCL_AVOID_RECORD_STREAMS",
})  # fmt: skip
"""Environment variables that turn knobs and load no code: by others (LD_PRELOAD, PYTHONPATH) a request could run anything."""

Word = Annotated[str, Field(max_length=300, pattern=r"^[^\x00]*$")]
Text = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f]*$")]
OwnName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Values = Annotated[list[Annotated[str, Field(min_length=1, max_length=60)]], Field(min_length=1, max_length=20)]


class SubmittedCommand(BaseModel):
    """A training script of the server's, with placeholders; it must begin as one that the server allows, in its folder."""

    model_config = ConfigDict(extra="forbid", strict=True)

    arguments: Annotated[list[Word], Field(min_length=1, max_length=100)]
    """The words of the command."""
    folder: Text
    """Where it runs."""
    launcher: Text = "torchrun"
    """torchrun, deepspeed or accelerate."""
    plugin: Annotated[str, Field(max_length=20)] = ""
    """With the launcher accelerate: deepspeed or fsdp."""
    parameter_count: Annotated[Integer, Field(ge=0, le=2**53)] = 0
    pattern: Text | None = None
    """What in its log tells its rate, in named groups."""
    script_knobs: Annotated[dict[OwnName, Values], Field(max_length=10)] = {}
    environment_knobs: Annotated[dict[OwnName, Values], Field(max_length=10)] = {}
    report_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None


def allowed_command(command: SubmittedCommand, allowed: Sequence[str]) -> dict[str, Any]:
    """The command as a request has it.

    Raises:
        RequestError: the server does not allow it.
    """
    folder = command.folder.rstrip("/") or "/"
    beginnings = [words for place, words in map(parse_allowed, allowed) if place == folder]
    if not any(tuple(command.arguments[: len(words)]) == words for words in beginnings):
        problem = "is not among the commands and folders that this server allows"
        raise RequestError("command", problem, "ask who runs the server (--allow-command)")
    unsafe = sorted(set(command.environment_knobs) - SAFE_VARIABLES)
    if unsafe:
        remedy = f"use some of {', '.join(sorted(SAFE_VARIABLES))}"
        raise RequestError(f"command.environment_knobs.{unsafe[0]}", "is no variable that a submission may set", remedy)
    return {**command.model_dump(exclude_none=True), "folder": folder}
