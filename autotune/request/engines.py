"""The capabilities of engines by name, from files that do not import torch, and the capability of a user's command."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path, PurePath

from autotune.errors import RequestError
from autotune.request.request import JobRequest
from executor.engines.capabilities import COMMAND, DDP, FSDP2, NATIVE
from executor.engines.deepspeed.capability import DEEPSPEED, installed_version, unusable
from search_spaces.capability import Capability
from search_spaces.environment import ENVIRONMENT
from search_spaces.errors import Refusal
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, value_text
from search_spaces.models.command import CommandModel, program_at
from search_spaces.placeholders import expressible_values, files_read, is_trainer, require_known
from search_spaces.plugins import PluginGroup, load_plugins
from search_spaces.trial_config import SCRIPT

CAPABILITIES: dict[str, Capability] = {
    engine.engine: engine for engine in (NATIVE, DDP, FSDP2, DEEPSPEED, *load_plugins(PluginGroup.CAPABILITIES).values())
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


PLACES: tuple[Value, ...] = ("none", "cpu")
"""Offload targets of rendered files: NVMe would need a path, which is not known."""
Knobs = Mapping[str, tuple[Value, ...] | None]
"""Knob -> its values that reach the script; None: all."""
DEEPSPEED_FILE_KNOBS: Knobs = dict.fromkeys((
    "zero_stage", "micro_batch_size", "reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
    "max_live_parameters", "reshard_after_forward", "overlap_comm", "contiguous_gradients", "reduce_dtype", "precision",
    "offload_ratio",
)) | {"offload_optimizer": PLACES, "offload_param": PLACES}  # fmt: skip
"""Knobs that DeepSpeed reads from its file: it accepts allgather_bucket_size, but never reads it."""
FSDP: Knobs = {
    "zero_stage": (0, 2, 3), "precision": ("fp32", "bf16", "fp16"), "offload_param": PLACES,
    "activation_checkpointing": ("none", "full"),
}  # fmt: skip
"""Knobs that Accelerate passes to FSDP2: stage 2 keeps parameters gathered after forward, 3 does not; 0 is DDP."""
FILE_KNOBS: Mapping[str, Knobs] = {"config": DEEPSPEED_FILE_KNOBS, "accelerate": FSDP}
"""Placeholder of a file -> the knobs that its format supports."""


def capability_for(command: CommandModel) -> Capability:
    """The knobs that the command can set: those with a placeholder, and those in a file that it reads.

    Raises:
        SearchSpaceError: a placeholder is unknown, or the command does not use a script knob.
    """
    require_known(command)
    knobs: dict[str, tuple[Value, ...] | None] = {}
    if command.launcher == "accelerate":  # its environment variables pass them on
        knobs |= FSDP if command.plugin == "fsdp" else {"precision": FSDP["precision"]}
    for file in files_read(command):
        # A Trainer reads these from its arguments, regardless of its DeepSpeed file.
        argument_knobs = ("micro_batch_size", "precision") if file == "config" and is_trainer(command) else ()
        knobs |= {name: values for name, values in FILE_KNOBS[file].items() if name not in argument_knobs}
    # No other knob reaches the script, except the environment, which it inherits from the rank that starts it.
    return Capability(engine=COMMAND, knobs={**knobs, **expressible_values(command), ENVIRONMENT: None})


def require_script(command: CommandModel) -> None:
    """Refuse a command whose script is not in its folder, if that folder is on this machine.

    Raises:
        RequestError: there is no such file; the message names the closest.
    """
    words, folder = command.arguments, Path(command.folder)
    at = program_at(words)
    # Another program, such as a container launcher, may interpret its arguments differently.
    plain = (
        at is not None and (at == 0 or re.fullmatch(r"(?:python[\d.]*|bash|sh)", PurePath(words[0]).name)) and folder.is_dir()
    )
    if at is None or not plain or not all(word.startswith("-") for word in words[1:at]) or "-m" in words[:at]:
        return
    if "{" in (word := words[at]):
        return
    file = folder / word
    if file.is_file():
        return
    existing = [path.name for path in file.parent.glob(f"*{file.suffix}")] if file.parent.is_dir() else []
    close_matches = difflib.get_close_matches(file.name, existing, n=1)
    remedy = (
        f"did you mean {Path(word).with_name(close_matches[0])}?"
        if close_matches
        else "give its path from the folder of the command"
    )
    raise RequestError("command", f"there is no {word} in {folder}", remedy)


def require_carried(request: JobRequest, capability: Capability) -> None:
    """Refuse a knob that the user names but the command does not pass on: searching it would have no effect.

    Raises:
        RequestError: there is such a knob.
    """
    for name in (*request.pins, *(request.baseline or {})):
        if name == SCRIPT or name not in KNOBS or name in capability.knobs:
            continue
        requested = request.pins.get(name, (request.baseline or {}).get(name))
        if value_text(requested) != value_text(KNOBS[name].default):
            problem = f"no placeholder of the command carries {name}"
            raise RequestError("command", problem, f"write {carriers_of(name)} in it, or leave {name} out")


def carriers_of(name: str) -> str:
    """The placeholders that would pass on a knob, as text for a message."""
    files = [file for file, knobs in FILE_KNOBS.items() if name in knobs]
    return " or ".join(f"{{{carrier}}}" for carrier in (name, *files))
