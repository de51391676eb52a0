"""The default database's folder, and files that only their owner can access. Does not import SQLAlchemy."""

import contextlib
import os
import tempfile
from pathlib import Path

from platformdirs import user_data_path


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700. An existing folder stays unchanged."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o700, exist_ok=True)


def make_private_file(file: Path) -> None:
    """Create an empty file with mode 0600. An existing file stays unchanged.

    It is not even opened: closing a file that SQLite also has open would release this process's locks on it.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def write_private(file: Path, text: str) -> None:
    """Write a new file with mode 0600, atomically: it gets its name when it is complete.

    Raises:
        FileExistsError: the file exists.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # mode 0600, unique name
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def default_file() -> Path:
    """The file in the user's data folder."""
    return user_data_path("autotune") / "autotune.db"


def has_default_database() -> bool:
    """Whether AUTOTUNE_DB names a database, or the default file exists. Creates nothing."""
    return bool(os.environ.get("AUTOTUNE_DB")) or default_file().exists()
