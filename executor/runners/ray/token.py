"""Ray's authentication token. A head that finds one on its machine requires it; a client that joins by address sends none by
default.

We do not send it by default: this process would then require it from the nodes in turn, and a cluster without a token has none.
A Ray that is started here requires one, and Ray applies that to this whole process from then on, unless it is reset.
"""

import contextlib
import os
from collections.abc import Iterator

import ray

from executor.errors import RunnerError

MODE = "RAY_AUTH_MODE"
"""The variable that makes Ray require and send a token."""


def restore_token_mode(former: str | None) -> None:
    """Restore this process's token mode, which a Ray that was started here has changed. That Ray must have ended.

    `former`: the value of `MODE` before the start; None: it was not set.
    """
    if os.environ.get(MODE) == former:
        return
    os.environ.pop(MODE, None)
    if former is not None:
        os.environ[MODE] = former
    raylet = ray._raylet
    if hasattr(raylet, "AuthenticationTokenLoader"):  # private to Ray (2.60); older versions have no tokens
        # In this order: a thread of the ended Ray may still look for the token.
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def explain_token_error(address: str | None) -> Iterator[None]:
    """Replace the error of a cluster that requires its token by one that says so, with the remedy.

    Raises:
        RunnerError: in place of the original error.
    """
    try:
        yield
    except RunnerError as error:
        if not _is_unauthenticated(error):
            raise
        remedy = "set RAY_AUTH_MODE=token, with the file ~/.ray/auth_token of its head (or RAY_AUTH_TOKEN)"
        raise RunnerError(f"the Ray cluster at {address} asks for its token; {remedy}") from error


def _is_unauthenticated(error: BaseException) -> bool:
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, ray.exceptions.AuthenticationError):
            return True
        reason = reason.__cause__ or reason.__context__
    return False
