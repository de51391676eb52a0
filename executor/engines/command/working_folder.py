"""The folder in which a trial's script runs, if that is not the user's own."""

import shutil
from itertools import islice
from pathlib import Path

from executor.errors import EngineRefusalError

MOST_COPIED_BYTES = 2 * 2**30
"""Size up to which a folder is copied for every trial."""
MOST_ENTRIES = 2_000
"""Entries of a folder above which a link stands for all of it: it holds data."""
SMALL_BYTES = 2**20
"""Size up to which a file is copied instead of linked, because a script may open it for writing (logs, states, indices)."""
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp", ".pkl", ".h5")
"""Endings of files that runs write and resume from."""


def make_working_folder(source: Path, folder: Path, way: str) -> None:
    """Fill `folder` from the user's folder.

    Args:
        source: the user's folder.
        folder: the new one.
        way: `copy`: everything is copied. `link`: directories are made anew, small files are copied, and links stand for large
            files, for directories with very many entries and for hidden ones; checkpoints are left out, so that no trial
            resumes from them or overwrites them.

    Raises:
        EngineRefusalError: it is too large to copy.
    """
    if way == "link":
        _link(source, folder)
        return
    folders, size = [source], 0
    while folders:
        for entry in folders.pop().iterdir():
            size += entry.lstat().st_size
            folders += [entry] if entry.is_dir() and not entry.is_symlink() else []
        if size > MOST_COPIED_BYTES:
            problem = f"{source} holds more than {MOST_COPIED_BYTES >> 30} GiB, too much to copy for every trial"
            raise EngineRefusalError("trial-folder", f"{problem}; use --trial-folder link")
    shutil.copytree(source, folder, symlinks=True)


def _link(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for entry in source.iterdir():
        target = folder / entry.name
        is_folder = entry.is_dir() and not entry.is_symlink()
        if (
            is_folder
            and not entry.name.startswith(".")
            and sum(1 for _ in islice(entry.iterdir(), MOST_ENTRIES + 1)) <= MOST_ENTRIES
        ):
            _link(entry, target)
        elif not entry.is_dir() and entry.name.lower().endswith(CHECKPOINTS):
            continue
        elif entry.is_file() and entry.stat().st_size <= SMALL_BYTES:
            shutil.copy2(entry, target)
        else:
            target.symlink_to(entry.absolute())
