"""Writing a result where the user wants it, whole or not at all."""

import os
import tempfile
from pathlib import Path

from autotune.errors import OutputError


def require_writable(path: Path) -> None:
    """Prove, before the first trial, that `path` can be written.

    Raises:
        OutputError: it is a folder, its folder does not exist, or nothing can be created there.
    """
    if path.is_dir():
        raise OutputError("out", f"{path} is a folder", "give the path of a file")
    try:
        # Permission bits do not tell of read-only file systems, and root passes them all: only a real file does.
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise OutputError("out", f"{path} cannot be written ({error.strerror})", "give a path in a writable folder") from error


def write_whole(path: Path, text: str, private: bool = False) -> None:
    """Write the file so that a reader finds the old content or the new, never a part; `private`: for its owner alone.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _publish(Path(name), path, private)
    except OSError as error:
        raise OutputError("out", f"{path} cannot be written ({error.strerror})", "give a path in a writable folder") from error


def _publish(temporary: Path, path: Path, private: bool) -> None:
    umask = os.umask(0)
    os.umask(umask)
    try:
        if not private:  # as it was made
            temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
