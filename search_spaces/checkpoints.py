"""Cancellation points: a long computation regularly calls back its caller, which can end it.

Counting, listing and predicting a whole space takes from milliseconds to minutes, and a thread cannot be ended from outside.
So each of these computations calls `checkpoint` every few milliseconds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CALLBACK: ContextVar[Callable[[], None] | None] = ContextVar("checkpoint", default=None)


def checkpoint() -> None:
    """Call the caller's callback, which may raise; return at once if none is set."""
    callback = _CALLBACK.get()
    if callback is not None:
        callback()


@contextmanager
def checkpoints(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` at each checkpoint of this thread's computations: it returns to continue them, or raises to end them."""
    token = _CALLBACK.set(callback)
    try:
        yield
    finally:
        _CALLBACK.reset(token)
