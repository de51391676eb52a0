"""Opens and closes an Optuna storage."""

from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.storages import RDBStorage
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import RequestError
from storage.address import without_password


@contextmanager
def optuna_storage(url: str, field: str) -> Iterator[RDBStorage]:
    """Open the storage at the URL; errors name `field`.

    Raises:
        RequestError: the storage cannot be opened, read or written.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None
    try:
        storage = RDBStorage(url)
        yield storage
    except RequestError:
        raise
    except (SQLAlchemyError, ImportError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        problem = f"{without_password(url)} cannot be used ({reason})"
        raise RequestError(field, problem, "give a URL such as sqlite:///studies.db") from error
    finally:
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()
