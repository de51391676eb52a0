"""Open the backend for jobs: a service or a database."""

import os

from autotune.cli.backend import JobBackend
from autotune.errors import RequestError
from autotune.installed import WHOLE, missing_line


def open_backend(url: str | None, database: str | None) -> JobBackend:
    """The named service or database: from an option, else AUTOTUNE_URL, else the default database.

    Raises:
        RequestError: both are named, or the address is invalid.
        DatabaseUnavailableError: the database cannot be opened.
    """
    if url is not None and database is not None:
        raise RequestError("url", "and --db are both given", "give the one that has the job")
    address = os.environ.get("AUTOTUNE_URL") if url is None and database is None else url
    # Imported on demand: one needs SQLAlchemy, the other httpx2.
    if address is not None and (address or url is not None):
        try:
            from autotune.cli.service_backend import ServiceBackend
        except ModuleNotFoundError as error:
            if error.name != "httpx2":
                raise
            problem = "the client of a service needs httpx2, which is not installed"
            raise RequestError("url", problem, "pip install httpx2, or leave --url and AUTOTUNE_URL out") from error

        return ServiceBackend(address, words=() if url is None else ("--url", url))
    try:
        from autotune.cli.database_backend import DatabaseBackend
        from storage.address import without_password
    except ModuleNotFoundError as error:
        line = missing_line(error)
        if line is None:
            raise
        raise RequestError(
            "url", "is missing, and this client reads no database", f"give --url, set AUTOTUNE_URL, or pip install {WHOLE}"
        ) from error

    return DatabaseBackend(database, words=() if database is None else ("--db", without_password(database)))
