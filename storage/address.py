"""Database addresses, and checks of a database file before it is opened."""

import os
import re
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from storage.errors import DatabaseUnavailableError
from storage.private_files import default_file, make_private_folder

_USE = "give a file path, sqlite:///PATH or postgresql://USER@HOST/NAME"


def default_database_url() -> str:
    """Return the address in AUTOTUNE_DB, else that of a file in the user's data folder, which is created if it is missing.

    Raises:
        DatabaseUnavailableError: the folder cannot be created.
    """
    if address := os.environ.get("AUTOTUNE_DB"):
        return address
    file = default_file()
    try:
        make_private_folder(file.parent)
    except OSError as error:
        raise _unavailable(str(file.parent), f"cannot be made ({error.strerror})", "name a database with --db") from error
    return URL.create("sqlite", database=str(file)).render_as_string()


def parse_address(address: str) -> URL:
    """Parse the address; one without a scheme is the path of an SQLite file.

    Raises:
        DatabaseUnavailableError: it is not an address, or the kind of database is not supported.
    """
    if "://" not in address:
        return _sqlite(address)
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        # The cause quotes the port, which may be a part of the password.
        raise _unavailable(without_password(address), "is not the address of a database", _USE) from None
    if url.get_backend_name() == "sqlite":
        return _sqlite(url.database or "")
    if url.get_backend_name() != "postgresql":
        raise _unavailable(describe(url), f"{url.get_backend_name()} databases are not supported", _USE)
    return url


def describe(url: URL) -> str:
    """Return the address as messages show it: the path of a file, or the URL with its password hidden."""
    return url.database or "" if url.get_backend_name() == "sqlite" else without_password(url.render_as_string())


def without_password(address: str) -> str:
    """Mask everything in an address that may be a password: the part before the last @, and secrets in its query.

    The address may be malformed: an unencoded slash in a password ends the part where parsers look for it.
    """
    scheme, mark, authority = address.partition("://")
    if not mark:
        return address
    before, query_mark, query = authority.partition("?") if "@" not in authority.partition("?")[2] else (authority, "", "")
    login, at, host = before.rpartition("@")
    user, colon, _ = login.partition(":")
    if colon:
        shown = f"{user}:***@{host}"
    else:
        # Text in the place of a port that is not a port: a password in an address without a host.
        shown = user + at + (host if "[" in host else re.sub(r":(?![0-9]*(?:/|$|,))[^/]*", ":***", host))
    secret_parts = r"([?&][^=&?]*(?:password|secret|token|key)[^=&?]*=)[^&]*"
    masked = re.sub(secret_parts, r"\1***", f"{shown}{query_mark}{query}", flags=re.IGNORECASE)
    return f"{scheme}://{masked}"


def passwords_of(url: URL) -> tuple[str, ...]:
    """Return the passwords in the address, which no message may contain."""
    query_passwords = [url.query.get(name) for name in ("password", "sslpassword")]
    return tuple(str(text) for text in (url.password, *query_passwords) if text)


def readable_by_others(address: str) -> Path | None:
    """Return the file of an SQLite database that other users can access; None: it is private."""
    url = parse_address(address)
    path = Path(describe(url))
    is_open = url.get_backend_name() == "sqlite" and path.exists() and path.stat().st_mode & 0o077
    return path if is_open else None


def check_file(path: Path) -> None:
    """Refuse a database file that cannot be written, according to the file system.

    Both the permission bits and the access are checked: root can write anything, but removed write bits are intentional. The
    folder must be writable too, because SQLite keeps its write-ahead log next to the file.

    Raises:
        DatabaseUnavailableError: the path is a folder, its folder is missing, or one of them is read-only.
    """
    try:
        path = path.resolve()
        if path.is_dir():
            raise _unavailable(str(path), "is a folder", f"give a file in it: {path / 'autotune.db'}")
        if not path.parent.is_dir():
            raise _unavailable(str(path.parent), "is not a folder that exists", f"make it: mkdir -p {path.parent}")
        for target in (path, path.parent):
            if target.exists() and not (target.stat().st_mode & 0o222 and os.access(target, os.W_OK)):
                raise _unavailable(str(target), "is read-only", f"chmod u+w {target}, or name another database with --db")
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, DatabaseUnavailableError):
            raise
        raise _unavailable(str(path), f"cannot be reached ({error})", "name another database with --db") from error


def _sqlite(path: str) -> URL:
    if path in ("", ":memory:"):
        raise _unavailable(repr(path), "names no file, and a job must outlive its process", _USE)
    try:
        # Absolute, because the process may change its directory before a later connection.
        return URL.create("sqlite", database=str(Path(path).expanduser().absolute()))
    except (OSError, RuntimeError) as error:
        raise _unavailable(path, f"cannot be reached ({error})", _USE) from error


def _unavailable(subject: str, problem: str, remedy: str) -> DatabaseUnavailableError:
    return DatabaseUnavailableError(f"{subject}: {problem}; {remedy}")
