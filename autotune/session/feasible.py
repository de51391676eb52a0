"""Checks before the first trial: some configuration can run, and the folder for offloaded states can be used."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import DoesNotFitError, NothingFeasibleError, RequestError
from autotune.request.request import JobRequest
from executor.errors import EngineRefusalError
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.model import Model, ModelSpec, Position
from search_spaces.space import SearchSpace
from search_spaces.training.states import file_bytes, states_lower_bound_bytes
from search_spaces.trial_config import TrialConfig


def require_positions(model: Model, sequence_length: int) -> None:
    """Refuse samples that are longer than a table of learned positions. Rotary positions have no limit.

    Raises:
        RequestError: the samples are too long.
    """
    if isinstance(model, ModelSpec) and model.position is Position.LEARNED and sequence_length > model.sequence_length:
        problem = f"{sequence_length} tokens are beyond the {model.sequence_length} learned positions of {model.name}"
        raise RequestError("sequence_length", problem, f"give at most {model.sequence_length}")


def require_fit(space: SearchSpace) -> None:
    """Refuse a model whose states are too large in every configuration.

    Raises:
        DoesNotFitError: on CPU ranks: they exceed the host's memory.
        NothingFeasibleError: they exceed the stated limit or the device.
    """
    least, available = smallest_bound_bytes(space), space.cluster.most_memory_bytes
    host = space.cluster.host_memory_bytes // min(space.cluster.devices_per_node, space.world_size)
    if space.cluster.device.kind == "cpu" and least > host:
        needs = f"the states of {space.model.name} need at least {_gib(least)} on each of {space.world_size} ranks"
        problem = f"{needs}, and the host has {_gib(host)} for each"
        raise DoesNotFitError("model", problem, "choose a smaller model, a larger cluster, or a space with higher ZeRO stages")
    if least > available:
        problem = f"every configuration of {space.model.name} needs at least {least:,} bytes on a rank, over {available:,}"
        raise NothingFeasibleError("memory_limit", problem, "raise the limit, add ranks, or choose a smaller model")


def smallest_bound_bytes(space: SearchSpace) -> int:
    """Return the least bytes that the states of any configuration need on a rank: each knob has its most economical value."""
    economical = ("zero_stage", "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "offload_optimizer")
    config = space.base

    def bound(option: TrialConfig) -> int:
        return states_lower_bound_bytes(option, space.model, space.world_size, space.capability)

    for name in (*economical, "offload_param", "offload_ratio", "precision"):
        values = space.domains.get(name, ())
        options: Sequence[TrialConfig] = [config.replace({name: value}) for value in values] or [config]
        config = min(options, key=bound)
    return bound(config)


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def require_folder(request: JobRequest) -> None:
    """Refuse a folder that the ranks of this machine cannot write to.

    Raises:
        RequestError: it is missing, not a folder, or not writable.
    """
    if request.nvme_path is None:
        return
    folder = Path(request.nvme_path)
    remedy = "name a folder on a fast local disk (--nvme-path), or leave it out"
    if not folder.exists():
        raise RequestError("nvme_path", f"{folder} does not exist", remedy)
    if not folder.is_dir():
        raise RequestError("nvme_path", f"{folder} is not a folder", remedy)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError("nvme_path", f"{folder} cannot be written to", remedy)


def space_problem(request: JobRequest, cluster: ClusterSpec, model: Model, config: TrialConfig) -> str | None:
    """Describe a lack of free space for the configuration's files; None: there is enough.

    This checks only the local node. Ranks on other nodes reserve their files before the first step, and fail with this message.
    """
    if request.nvme_path is None or not Path(request.nvme_path).is_dir():
        return None
    needed = file_bytes(config, model, cluster.world_size) // cluster.nodes
    free = shutil.disk_usage(request.nvme_path).free
    if needed <= free:
        return None
    problem = f"its states need {needed:,} bytes in files on {request.nvme_path}, which has {free:,} left"
    return f"{problem}; free some, or name another folder with --nvme-path"


def speed_warning(request: JobRequest) -> str | None:
    """Warn of a folder that is slow, measured as the engine uses it, or lacks direct I/O; None: no warning."""
    if request.nvme_path is None or not Path(request.nvme_path).is_dir():
        return None
    from executor.files.rank_file import quick_rate  # imported only for such jobs

    try:
        rate, direct = quick_rate(Path(request.nvme_path))
    except EngineRefusalError as error:
        return error.message
    how = "" if direct else ", without direct I/O, which its file system refuses"
    # Bytes/s below which a folder is reported as slow: less than a single SATA solid-state disk reaches.
    slow = 5e8
    if rate >= slow:
        return None if direct else f"nvme_path: {request.nvme_path} moves {rate / 1e9:.3g} GB/s{how}: through the page cache"
    problem = f"nvme_path: {request.nvme_path} moves {rate / 1e9:.3g} GB/s{how}"
    return f"{problem}; a solid-state disk moves {slow / 1e9:g} GB/s or more, and updates in files take accordingly longer"
