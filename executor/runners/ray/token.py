"""Ray's token: a head that finds one on its machine asks for it, and whoever joins by address sends none unless told to.

It is not sent unasked: then this process would ask the nodes for it in turn, and those of a cluster without one have none.
A Ray that is started here asks for one, and Ray has this whole process do so from then on, unless it is made to forget it.
"""

import contextlib
import os
from collections.abc import Iterator

import ray

from executor.errors import RunnerError

MODE = "RAY_AUTH_MODE"
"""The variable by which Ray is told whether to ask for a token and to send it."""


def put_mode_back(former: str | None) -> None:
    """Have this process send and ask for a token as it did before: a Ray that was started here, and has ended, changed that.

    `former`: what `MODE` was before the start; None: it was not set.
    """
    if os.environ.get(MODE) == former:
        return
    os.environ.pop(MODE, None)
    if former is not None:
        os.environ[MODE] = former
    raylet = ray._raylet
    if hasattr(raylet, "AuthenticationTokenLoader"):  # Ray's own, without a switch (2.60); older ones know of no token
        # In this order: a thread of the Ray that has ended may still look for the token.
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


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
