"""The placement of each rank of a configuration: its node, mesh coordinates, pipeline stages and layers."""

import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from autotune.session.session import Session
from executor.engines.command.launchers import accelerate_variables
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.environment import variables_of
from search_spaces.mesh import DIMENSIONS, PIPELINE, Mesh, make_mesh
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.models.pipeline import stages_of_model, stages_of_rank
from search_spaces.placeholders import FILES, accelerate_accumulation, environment_of, launch_paths, words_of
from search_spaces.trial_config import TrialConfig


def launch_of(config: TrialConfig, session: Session, starts_itself: bool = False) -> dict[str, Any]:
    """Return the launch command and the placement of each rank. The result depends only on the arguments.

    `starts_itself`: the user's script was seen to use no launcher's process group.
    """
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if config.expandable_segments else {}
    variables |= variables_of(config.environment)
    line = "autotune reproduce best-config.json"
    placement = _placement(config, session)
    if isinstance(session.model, CommandModel):
        variables |= environment_of(session.model, config)
        if session.model.launcher == "accelerate" and session.cluster.device.kind == "cpu":
            steps = accelerate_accumulation(session.model, config, session.request.global_batch_size, session.world_size)
            variables |= accelerate_variables(session.model.plugin, config, steps, FILES, on_cpu=True)
        line = _command_line(session.model, config, session, placement, starts_itself)
    return {"world_size": session.world_size, "placement": placement, "env": variables, "command": line}


def launch_line(document: Mapping[str, Any]) -> str:
    """Return a best-config document's launch as a shell line: variables, then the command."""
    launch = document["launch"]
    variables = [f"{name}={shlex.quote(value)}" for name, value in launch["env"].items()]
    return " ".join([*variables, launch["command"]])


def _command_line(
    command: CommandModel, config: TrialConfig, session: Session, placement: dict[str, Any], starts_itself: bool
) -> str:
    """The command line of the user's script under its launcher, on the first node; files have the names that it reads."""
    words = words_of(command, config, session.request.workload, session.world_size, launch_paths(command))
    if starts_itself and command.launcher == "torchrun" and session.world_size == 1:
        return shlex.join(words)
    python = words[0] in ("python", "python3")
    nodes, ranks = placement["nodes"], placement["ranks_per_node"]
    deepspeed = ["deepspeed"]
    if command.launcher == "deepspeed" and PurePath(words[0]).name.startswith("python") and not python:
        # DeepSpeed inserts --local_rank after the first word of a program that it does not start by its own Python.
        deepspeed, words, python = [words[0], "-m", "deepspeed.launcher.runner"], ("python", *words[1:]), True
    launcher = {
        "torchrun": ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks}", *([] if python else ["--no-python"])],
        "deepspeed": [*deepspeed, f"--num_nodes={nodes}", f"--num_gpus={ranks}", *([] if python else ["--no_python"])],
        "accelerate": ["accelerate", "launch", f"--num_machines={nodes}", f"--num_processes={session.world_size}"],
    }
    if command.launcher != "accelerate" or session.cluster.device.kind == "cpu":  # there Accelerate starts one process
        starter = launcher["torchrun" if command.launcher == "accelerate" else command.launcher]
        return shlex.join([*starter, *words[int(python) :]])
    return shlex.join([*launcher["accelerate"], *_accelerate_words(command, config, session), *words[int(python) :]])


def _accelerate_words(command: CommandModel, config: TrialConfig, session: Session) -> list[str]:
    """Options that replace the accelerate variables of trials. The files have the names that the exports use."""
    direct = [] if command.arguments[0] in ("python", "python3") else ["--no_python"]
    if command.plugin == "fsdp":
        return [f"--config_file={FILES['accelerate']}", *direct]
    steps = accelerate_accumulation(command, config, session.request.global_batch_size, session.world_size)
    words = [f"--gradient_accumulation_steps={steps}", *direct]
    if command.plugin == "deepspeed":
        return ["--use_deepspeed", f"--deepspeed_config_file={FILES['config']}", *words]
    return [f"--mixed_precision={config.precision if config.precision in ('bf16', 'fp16') else 'no'}", *words]


def _placement(config: TrialConfig, session: Session) -> dict[str, Any]:
    ranks_per_node = min(session.cluster.devices_per_node, session.world_size)
    mesh, stages = make_mesh(config, session.world_size), _stages(config, session)
    return {
        "nodes": -(-session.world_size // ranks_per_node),
        "ranks_per_node": ranks_per_node,
        "mesh": {**{dimension: mesh.size(dimension) for dimension in DIMENSIONS}, "order": mesh.order},
        "ranks": [
            {**_rank(rank, ranks_per_node, mesh, stages), **_device(session.cluster, rank)}
            for rank in range(session.world_size)
        ],
    }


def _rank(rank: int, ranks_per_node: int, mesh: Mesh, stages: list[list[dict[str, Any]]]) -> dict[str, Any]:
    node, local_rank = divmod(rank, ranks_per_node)
    places = mesh.coordinates(rank)
    return {
        "rank": rank,
        "node": node,
        "local_rank": local_rank,
        "coordinates": {dimension: places[dimension] for dimension in DIMENSIONS},
        "stages": stages[places[PIPELINE]],
    }


def _device(cluster: ClusterSpec, rank: int) -> dict[str, str]:
    """The rank's device; empty if all nodes of the cluster are alike."""
    return {"device": cluster.groups[cluster.group_of_rank(rank)].device.name} if cluster.groups else {}


def _stages(config: TrialConfig, session: Session) -> list[list[dict[str, Any]]]:
    """For each pipeline rank, its stages with their layers; null if the layers are unknown."""
    model = session.model
    stage_layers = None
    if isinstance(model, ModelSpec) or (isinstance(model, FactoryModel) and model.profile and model.profile.block_names):
        stage_layers = stages_of_model(model, config, session.request.sequence_length)
    places = [stages_of_rank(config, pipeline_rank) for pipeline_rank in range(config.pipeline_parallel_size)]
    return [
        [{"stage": stage, "layers": None if stage_layers is None else list(stage_layers[stage])} for stage in stage_indices]
        for stage_indices in places
    ]
