"""Prepares the launch of a script on this rank: placement, command, a launcher's environment variables, rendered files."""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.engine import RankContext
from executor.engines import leftovers
from executor.engines.command.process import Launch, python_command
from executor.measurement.agreement import gather_plain
from executor.measurement.memory import SLACK_BYTES
from executor.measurement.trial_state import Trial
from search_spaces.models.command import CommandModel, program_at
from search_spaces.placeholders import TRIAL_FOLDER, environment_of, names_in, words_of
from search_spaces.trial_config import TrialConfig

REPORT_VARIABLE = "AUTOTUNE_REPORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
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
    command: CommandModel, placement: Placement, config: TrialConfig, accumulation: int, files: Mapping[str, Path], on_cpu: bool
) -> dict[str, str]:
    """The variables that the command's launcher sets on this rank.

    `files`: placeholder -> the rendered file. `accumulation`: micro-batches in a step.
    """
    devices = {} if placement.visible_devices is None else {"CUDA_VISIBLE_DEVICES": placement.visible_devices}
    own = {
        "torchrun": lambda: _torchrun(placement),
        "deepspeed": lambda: _deepspeed(placement, on_cpu),
        "accelerate": lambda: _torchrun(placement) | accelerate_variables(command.plugin, config, accumulation, files, on_cpu),
    }
    return {**_common_variables(placement), **devices, **own[command.launcher]()}


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """The script's environment: the rank's own, overridden by `variables`; output is unbuffered, faults print a traceback."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **variables}


def launcher_command(launcher: str, words: Sequence[str], placement: Placement) -> list[str]:
    """The command as the launcher passes it on: deepspeed inserts `--local_rank` directly after the script's name."""
    program = program_at(words) if launcher == "deepspeed" else None
    if program is None:
        return list(words)
    return [*words[: program + 1], f"--local_rank={placement.local_rank}", *words[program + 1 :]]


def _common_variables(placement: Placement) -> dict[str, str]:
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "MASTER_ADDR": placement.address,
        "MASTER_PORT": str(placement.port),
    }


def _torchrun(placement: Placement) -> dict[str, str]:
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


def _deepspeed(placement: Placement, on_cpu: bool) -> dict[str, str]:
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


@contextlib.contextmanager
def trial_folder() -> Iterator[Path]:
    """A temporary folder of this rank, removed when the trial ends."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-trial-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_launch(trial: Trial, command: CommandModel, placement: Placement, folder: Path, on_cpu: bool) -> Launch:
    """Build the launch of this rank's script."""
    request = trial.request
    config, work = request.config, request.workload
    files = _write_files(request.files, folder)
    paths = {TRIAL_FOLDER: str(placement.folder), **{name: str(path) for name, path in files.items()}}
    words = words_of(command, config, work, request.world_size, paths)
    if TRIAL_FOLDER in names_in(command.arguments):
        placement.folder.mkdir(parents=True, exist_ok=True)
    accumulation = config.gradient_accumulation_steps(work.global_batch_size, request.world_size)
    variables = {
        **launcher_environment(command, placement, config, accumulation, files, on_cpu),
        **_extensions_variable(command, files),
        REPORT_VARIABLE: str(folder / "report.jsonl"),
        **environment_of(command, config),
    }
    limit = request.memory_limit_bytes
    return Launch(
        words=tuple(launcher_command(command.launcher, python_command(words), placement)),
        environment=inherited(variables),
        folder=command.folder,
        # The resident set decides the outcome; this limit stops a process that would exhaust the host before the next look.
        data_limit=2 * limit + SLACK_BYTES if on_cpu and limit is not None else None,
        shared_memory=leftovers.shared_memory(placement.address, placement.port),
    )


def _write_files(files: tuple[tuple[str, str], ...], folder: Path) -> dict[str, Path]:
    """Write the files; return placeholder -> path of each."""
    written: dict[str, Path] = {}
    for name, content in files:
        path = folder / name
        path.write_text(content, encoding="utf-8")
        written[path.stem] = path
    return written


def _extensions_variable(command: CommandModel, files: Mapping[str, Path]) -> dict[str, str]:
    """The folder of compiled extensions, for a script that may use DeepSpeed. A folder that the user has set is kept."""
    compiles = command.launcher == "deepspeed" or "config" in files
    if not compiles or leftovers.VARIABLE in os.environ:
        return {}
    return {leftovers.VARIABLE: str(leftovers.extensions_folder())}


def gather_placement(context: RankContext, folder: Path) -> Placement:
    """Gather the hosts, port, folders and devices of all ranks; return the placement of this rank's script.

    `folder`: this rank's temporary folder; that of rank 0 holds the folder of the trial.
    """
    rows: list[dict[str, Any]] = gather_plain(
        context,
        {
            "host": socket.gethostname(),
            "address": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "port": _free_port() if context.rank == 0 else 0,
            "folder": str(folder / "run"),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        },
    )
    hosts = list(dict.fromkeys(row["host"] for row in rows))
    mine = rows[context.rank]["host"]
    same_host = [rank for rank, row in enumerate(rows) if row["host"] == mine]
    return Placement(
        rank=context.rank,
        world_size=context.world_size,
        local_rank=same_host.index(context.rank),
        local_world_size=len(same_host),
        node=hosts.index(mine),
        nodes=len(hosts),
        address=rows[0]["address"],
        port=rows[0]["port"],
        folder=Path(rows[0]["folder"]),
        visible_devices=devices_of_host([rows[rank]["visible"] for rank in same_host]),
    )


def devices_of_host(visible: list[str | None]) -> str | None:
    """All devices of the host in rank order, if each rank sees a different one (as under Ray); else None."""
    if len(set(visible)) < 2:
        return None
    devices = [device for shown in visible for device in (shown or "").split(",") if device]
    return ",".join(dict.fromkeys(devices))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
