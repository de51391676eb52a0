"""The capabilities of engines by name, from files that do not import torch."""

from autotune.errors import RequestError
from autotune.request.script_capability import capability_for
from executor.engines.command.capability import COMMAND
from executor.engines.ddp.capability import DDP
from executor.engines.deepspeed.capability import DEEPSPEED, installed_version, unusable
from executor.engines.fsdp2.capability import FSDP2
from executor.engines.native.capability import NATIVE
from search_spaces.capability import Capability
from search_spaces.models.command import CommandModel
from search_spaces.plugins import Group, load_plugins
from search_spaces.refusal import Refusal

CAPABILITIES: dict[str, Capability] = {
    engine.engine: engine for engine in (NATIVE, DDP, FSDP2, DEEPSPEED, *load_plugins(Group.CAPABILITIES).values())
}
"""Engine -> its capability. That of `command` follows from the user's command."""


def capability_of(engine: str, command: CommandModel | None = None) -> Capability:
    """The capability of the engine with this name; `command`: the command that the engine `command` runs.

    Raises:
        RequestError: no engine has this name, or the command is missing.
        SearchSpaceError: a placeholder of the command is unknown.
    """
    if engine == COMMAND:
        if command is None:
            raise RequestError(
                "command", "is missing", "write it after --, as in -- python train.py --batch {micro_batch_size}"
            )
        return capability_for(command)
    if engine not in CAPABILITIES:
        raise RequestError("engine", f"{engine!r} is not known", f"use one of {', '.join((*CAPABILITIES, COMMAND))}")
    return CAPABILITIES[engine]


def why_unusable(engine: str) -> Refusal | None:
    """Why a third-party engine cannot run trials on this machine, with the remedy; None: it can."""
    return unusable(installed_version()) if engine == DEEPSPEED.engine else None


def require_usable(engine: str) -> None:
    """Refuse an engine whose package is missing on this machine.

    Raises:
        RequestError: it is not installed, or too old.
    """
    refusal = why_unusable(engine)
    if refusal is not None:
        raise RequestError(f"engine {engine}", refusal.message, refusal.remedy)
