"""What torchrun, deepspeed and accelerate pass to the process of a rank: environment variables and an argument."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from search_spaces.models.command import CommandModel, program_at
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Position of a rank's script among all ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    address: str
    """Address of rank 0."""
    port: int
    """Port that was free on rank 0's host when it was chosen; the script's rank 0 binds it."""
    folder: Path = Path("run")
    """A folder of the trial, the same for all ranks, for what the script writes."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES for every rank of this host, so that LOCAL_RANK indexes into them; None: unchanged."""


def launcher_environment(
    command: CommandModel,
    placement: RankPlacement,
    config: TrialConfig,
    accumulation: int,
    files: Mapping[str, Path],
    on_cpu: bool,
) -> dict[str, str]:
    """The variables that the command's launcher sets on this rank.

    `files`: placeholder -> the rendered file. `accumulation`: micro-batches in a step.
    """
    devices = {} if placement.visible_devices is None else {"CUDA_VISIBLE_DEVICES": placement.visible_devices}
    launcher_variables = {
        "torchrun": lambda: _torchrun(placement),
        "deepspeed": lambda: _deepspeed(placement, on_cpu),
        "accelerate": lambda: _torchrun(placement) | accelerate_variables(command.plugin, config, accumulation, files, on_cpu),
    }
    return {**_common_variables(placement), **devices, **launcher_variables[command.launcher]()}


def launcher_command(launcher: str, words: Sequence[str], placement: RankPlacement) -> list[str]:
    """The command as the launcher passes it on: deepspeed inserts `--local_rank` directly after the script's name."""
    program = program_at(words) if launcher == "deepspeed" else None
    if program is None:
        return list(words)
    return [*words[: program + 1], f"--local_rank={placement.local_rank}", *words[program + 1 :]]


def _common_variables(placement: RankPlacement) -> dict[str, str]:
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "MASTER_ADDR": placement.address,
        "MASTER_PORT": str(placement.port),
    }


def _torchrun(placement: RankPlacement) -> dict[str, str]:
    """As torch.distributed.elastic.agent.server.local_elastic_agent (2.13), without an agent's store: rank 0 creates it."""
    return {
        "GROUP_RANK": str(placement.node),
        "GROUP_WORLD_SIZE": str(placement.nodes),
        "ROLE_RANK": str(placement.rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(placement.world_size),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "autotune",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _deepspeed(placement: RankPlacement, on_cpu: bool) -> dict[str, str]:
    """As deepspeed.launcher.launch (0.19.8)."""
    accelerator = {"DS_ACCELERATOR": "cpu"} if on_cpu else {}
    return {
        "CROSS_RANK": str(placement.node),
        "CROSS_SIZE": str(placement.nodes),
        "LOCAL_SIZE": str(placement.local_world_size),
        **accelerator,
    }


def accelerate_variables(
    plugin: str, config: TrialConfig, accumulation: int, files: Mapping[str, Path | str], on_cpu: bool
) -> dict[str, str]:
    """The variables that `accelerate launch` sets on a rank (1.15.0), as `prepare_multi_gpu_env` of accelerate.utils.launch.

    On CPUs that command starts one process with any options: its ranks are started by torchrun, with these variables.
    """
    variables = {
        "ACCELERATE_MIXED_PRECISION": {"bf16": "bf16", "fp16": "fp16"}.get(config.precision, "no"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(accumulation),
        "ACCELERATE_DYNAMO_BACKEND": "no",
    }
    if on_cpu:
        variables["ACCELERATE_USE_CPU"] = "true"
    if plugin == "deepspeed":
        variables |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(files["config"]),
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(config.zero_stage),
        }
    if plugin == "fsdp" and config.zero_stage > 0:
        variables |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": _text(config.zero_stage == 3 and config.reshard_after_forward),
            "FSDP_OFFLOAD_PARAMS": _text(config.offload_param == "cpu"),
            "FSDP_ACTIVATION_CHECKPOINTING": _text(config.activation_checkpointing != "none"),
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        }
    return variables


def _text(value: bool) -> str:
    return str(value).lower()
