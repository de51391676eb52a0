"""What torchrun, deepspeed and accelerate tell the process of a rank: environment variables, and an argument."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from search_spaces.command import CommandModel, program_at
from search_spaces.trial_config import TrialConfig

REPORT_VARIABLE = "AUTOTUNE_REPORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank's script stands among all."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    address: str
    """Of rank 0."""
    port: int
    """Free on rank 0's host a moment ago: the script's rank 0 binds it."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES for the ranks of this host alike, so that LOCAL_RANK chooses among them; None: as it is."""


def launcher_environment(
    command: CommandModel, place: Place, config: TrialConfig, accumulation: int, files: Mapping[str, Path], on_cpu: bool
) -> dict[str, str]:
    """The variables that the command's launcher sets on this rank.

    `files`: placeholder -> the rendered file. `accumulation`: micro-batches in a step.
    """
    devices = {} if place.visible_devices is None else {"CUDA_VISIBLE_DEVICES": place.visible_devices}
    own = {
        "torchrun": lambda: _torchrun(place),
        "deepspeed": lambda: _deepspeed(place, on_cpu),
        "accelerate": lambda: _torchrun(place) | _accelerate(command.plugin, config, accumulation, files, on_cpu),
    }
    return {**_everyones(place), **devices, **own[command.launcher]()}


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """What a script finds: the rank's own variables, and these in their place. Output comes at once, faults tell where."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **variables}


def launcher_words(launcher: str, words: Sequence[str], place: Place) -> list[str]:
    """The words as the launcher passes them on: deepspeed's tells the script its local rank, right after its name."""
    program = program_at(words) if launcher == "deepspeed" else None
    if program is None:
        return list(words)
    return [*words[: program + 1], f"--local_rank={place.local_rank}", *words[program + 1 :]]


def _everyones(place: Place) -> dict[str, str]:
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }


def _torchrun(place: Place) -> dict[str, str]:
    """Of torch.distributed.elastic.agent.server.local_elastic_agent (2.13), without an agent's store: rank 0 makes its own."""
    return {
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(place.world_size),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "autotune",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _deepspeed(place: Place, on_cpu: bool) -> dict[str, str]:
    """Of deepspeed.launcher.launch (0.19.8)."""
    accelerator = {"DS_ACCELERATOR": "cpu"} if on_cpu else {}
    return {
        "CROSS_RANK": str(place.node),
        "CROSS_SIZE": str(place.nodes),
        "LOCAL_SIZE": str(place.local_world_size),
        **accelerator,
    }


def _accelerate(plugin: str, config: TrialConfig, accumulation: int, files: Mapping[str, Path], on_cpu: bool) -> dict[str, str]:
    """Of accelerate.utils.launch: `prepare_multi_gpu_env`."""
    found = {
        "ACCELERATE_MIXED_PRECISION": {"bf16": "bf16", "fp16": "fp16"}.get(config.precision, "no"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(accumulation),
        "ACCELERATE_DYNAMO_BACKEND": "no",
    }
    if on_cpu:
        found["ACCELERATE_USE_CPU"] = "true"
    if plugin == "deepspeed":
        found |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(files["config"]),
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(config.zero_stage),
        }
    if plugin == "fsdp" and config.zero_stage > 0:
        found |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": _text(config.zero_stage == 3 and config.reshard_after_forward),
            "FSDP_OFFLOAD_PARAMS": _text(config.offload_param == "cpu"),
            "FSDP_ACTIVATION_CHECKPOINTING": _text(config.activation_checkpointing != "none"),
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        }
    return found


def _text(value: bool) -> str:
    return str(value).lower()
