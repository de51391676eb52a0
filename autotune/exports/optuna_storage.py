"""A database of Optuna's, opened and closed."""

from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.storages import RDBStorage
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import RequestError


@contextmanager
def optuna_storage(url: str, field: str) -> Iterator[RDBStorage]:
    """The storage at the URL; `field` is what an error names.

    Raises:
        RequestError: it cannot be opened, read or written.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None
    try:
        storage = RDBStorage(url)
        yield storage
    except RequestError:
        raise
    except (SQLAlchemyError, ImportError, RuntimeError, ValueError) as error:
        told = " ".join(str(error).split())[:200]
        raise RequestError(field, f"{url} cannot be used ({told})", "give a URL such as sqlite:///studies.db") from error
    finally:
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()
