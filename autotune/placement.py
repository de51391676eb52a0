"""Where each rank of a configuration runs: its node, its place along each parallel dimension, its layers."""

from typing import Any

from autotune.jobs.session import Session
from search_spaces.mesh import DIMENSIONS, PIPELINE, Mesh, make_mesh
from search_spaces.model import ModelSpec
from search_spaces.pipeline import split_layers, stages_of_rank
from search_spaces.trial_config import TrialConfig

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"


def launch_of(config: TrialConfig, session: Session) -> dict[str, Any]:
    """How the configuration is started, and where each of its ranks stands. It follows from the arguments alone."""
    return {
        "world_size": session.world_size,
        "placement": _placement(config, session),
        "env": {ALLOCATOR_VARIABLE: "expandable_segments:True"} if config.expandable_segments else {},
        "command": "autotune reproduce best-config.json",
    }


def _placement(config: TrialConfig, session: Session) -> dict[str, Any]:
    ranks_per_node = min(session.cluster.devices_per_node, session.world_size)
    mesh, stages = make_mesh(config, session.world_size), _stages(config, session)
    return {
        "nodes": -(-session.world_size // ranks_per_node),
        "ranks_per_node": ranks_per_node,
        "mesh": {**{dimension: mesh.size(dimension) for dimension in DIMENSIONS}, "order": mesh.order},
        "ranks": [_rank(rank, ranks_per_node, mesh, stages) for rank in range(session.world_size)],
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


def _stages(config: TrialConfig, session: Session) -> list[list[dict[str, Any]]]:
    """For each place along the pipeline, its stages with their layers; null where the layers are not known."""
    model = session.model
    known = split_layers(model, config, session.request.sequence_length) if isinstance(model, ModelSpec) else None
    places = [stages_of_rank(config, place) for place in range(config.pipeline_parallel_size)]
    return [[{"stage": stage, "layers": None if known is None else list(known[stage])} for stage in held] for held in places]
