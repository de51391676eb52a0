"""Ray's token: a head that finds one on its machine asks for it, and whoever joins by address sends none unless told to.

It is not sent unasked: then this process would ask the nodes for it in turn, and those of a cluster without one have none.
"""

import contextlib
from collections.abc import Iterator

import ray

from executor.errors import RunnerError


@contextlib.contextmanager
def token_told(address: str | None) -> Iterator[None]:
    """Inside it, a cluster that asks for its token is told as that, with what to do.

    Raises:
        RunnerError: in the place of another that came of it.
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
