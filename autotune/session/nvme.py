"""Checks of the folder for states that are offloaded to files: access, free space, speed."""

import os
import shutil
from pathlib import Path

from autotune.errors import RequestError
from autotune.request.request import JobRequest
from executor.errors import EngineRefusalError
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.model import Model
from search_spaces.training.states import file_bytes
from search_spaces.trial_config import TrialConfig

SLOW = 5e8
"""Bytes/s below which a folder is reported as slow: less than a single SATA solid-state disk reaches."""
REMEDY = "name a folder on a fast local disk (--nvme-path), or leave it out"


def require_folder(request: JobRequest) -> None:
    """Refuse a folder that the ranks of this machine cannot write to.

    Raises:
        RequestError: it is missing, not a folder, or not writable.
    """
    if request.nvme_path is None:
        return
    folder = Path(request.nvme_path)
    if not folder.exists():
        raise RequestError("nvme_path", f"{folder} does not exist", REMEDY)
    if not folder.is_dir():
        raise RequestError("nvme_path", f"{folder} is not a folder", REMEDY)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError("nvme_path", f"{folder} cannot be written to", REMEDY)


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
    if rate >= SLOW:
        return None if direct else f"nvme_path: {request.nvme_path} moves {rate / 1e9:.3g} GB/s{how}: through the page cache"
    problem = f"nvme_path: {request.nvme_path} moves {rate / 1e9:.3g} GB/s{how}"
    return f"{problem}; a solid-state disk moves {SLOW / 1e9:g} GB/s or more, and updates in files take accordingly longer"
