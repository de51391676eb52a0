"""Files and folders for their owner alone, whatever the umask says."""

import contextlib
import os
import tempfile
from pathlib import Path

FILE = 0o600
FOLDER = 0o700


def make_private_folder(folder: Path) -> None:
    """Make a folder with mode 0700, and those above it that are missing. One that is there stays as it is."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=FOLDER, exist_ok=True)


def make_private_file(file: Path) -> None:
    """Make an empty file with mode 0600. One that is there stays as it is.

    It is not even opened: to close a file that SQLite has open too would end the locks that this process holds on it.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE))


def write_private(file: Path, text: str) -> None:
    """Write a new file with mode 0600.

    A reader never finds half of it: it gets its name when it is whole.

    Raises:
        FileExistsError: it is there already.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # mode 0600, and nobody else's
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)
