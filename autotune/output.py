"""Write output files atomically."""

import os
import tempfile
from pathlib import Path

from autotune.errors import OutputError


def require_writable(path: Path, option: str = "out") -> None:
    """Check, before the first trial, that `path`, which an option names, can be written.

    Raises:
        OutputError: it is a folder, its folder does not exist, or no file can be created there.
    """
    if path.is_dir():
        raise OutputError(option, f"{path} is a folder", "give the path of a file")
    try:
        # Permission bits do not reveal read-only file systems, and root ignores them: only creating a file is a proof.
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise OutputError(option, f"{path} cannot be written ({error.strerror})", "give a path in a writable folder") from error


def write_whole(path: Path, text: str, private: bool = False) -> None:
    """Write the file atomically: readers find the old or the new content. `private`: only its owner can read it.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            _publish(Path(name), path, private)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError("out", f"{path} cannot be written ({error.strerror})", "give a path in a writable folder") from error


def _publish(temporary: Path, path: Path, private: bool) -> None:
    umask = os.umask(0)
    os.umask(umask)
    if not private:  # mkstemp creates private files
        temporary.chmod(0o666 & ~umask)
    temporary.replace(path)
