"""The folder for states that are offloaded to files: whether it can be used, what it has room for, and how fast it is."""

import os
import shutil
from pathlib import Path

from autotune.errors import RequestError
from autotune.request.request import JobRequest
from executor.errors import EngineRefusalError
from search_spaces.cluster import ClusterSpec
from search_spaces.model import Model
from search_spaces.offload_files import file_bytes
from search_spaces.trial_config import TrialConfig

SLOW = 5e8
"""Bytes/s below which a folder is told to be slow: less than a single solid-state disk of the older interface has."""
REMEDY = "name a folder on a fast local disk (--nvme-path), or leave it out"


def require_folder(request: JobRequest) -> None:
    """Refuse a folder that the ranks of this machine cannot write to.

    Raises:
        RequestError: it is missing, no folder, or not writable.
    """
    if request.nvme_path is None:
        return
    folder = Path(request.nvme_path)
    if not folder.exists():
        raise RequestError("nvme_path", f"{folder} does not exist", REMEDY)
    if not folder.is_dir():
        raise RequestError("nvme_path", f"{folder} is no folder", REMEDY)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError("nvme_path", f"{folder} cannot be written to", REMEDY)


def lacking_room(request: JobRequest, cluster: ClusterSpec, model: Model, config: TrialConfig) -> str | None:
    """How much the configuration's files need and the folder has, where that is too little; None: it is enough.

    Of other nodes nothing is known here: their ranks reserve their files before the first step, and refuse as this does.
    """
    if request.nvme_path is None or not Path(request.nvme_path).is_dir():
        return None
    needed = file_bytes(config, model, cluster.world_size) // cluster.nodes
    free = shutil.disk_usage(request.nvme_path).free
    if needed <= free:
        return None
    problem = f"its states need {needed:,} bytes in files on {request.nvme_path}, which has {free:,} left"
    return f"{problem}; free some, or name another folder with --nvme-path"


def slowness(request: JobRequest) -> str | None:
    """What is to be told of a folder that is slow, measured as the engine uses it, or without direct I/O; None: nothing."""
    if request.nvme_path is None or not Path(request.nvme_path).is_dir():
        return None
    from executor.measurement.file_rates import quick_rate  # the ranks' own reading and writing: for such jobs alone

    try:
        rate, direct = quick_rate(Path(request.nvme_path))
    except EngineRefusalError as error:
        return error.message
    how = "" if direct else ", without direct I/O, which its file system refuses"
    if rate >= SLOW:
        return None if direct else f"nvme_path: {request.nvme_path} moves {rate / 1e9:.3g} GB/s{how}: through the page cache"
    told = f"nvme_path: {request.nvme_path} moves {rate / 1e9:.3g} GB/s{how}"
    return f"{told}; a solid-state disk moves {SLOW / 1e9:g} GB/s or more, and updates in files will take accordingly longer"
