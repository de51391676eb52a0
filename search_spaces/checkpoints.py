"""Whether a long computation goes on: asked now and then from within, answered by whoever started it.

Counting a space, listing it and predicting all of it take from milliseconds to minutes, and cannot be ended from outside: a
thread has no end but its own. So each of them passes checkpoints, some milliseconds apart.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ANSWERED: ContextVar[Callable[[], None] | None] = ContextVar("checkpoint", default=None)


def checkpoint() -> None:
    """Raises what whoever started the computation answers; returns at once where nobody asked for checkpoints."""
    answer = _ANSWERED.get()
    if answer is not None:
        answer()


@contextmanager
def checkpoints(answer: Callable[[], None]) -> Iterator[None]:
    """Call `answer` at each checkpoint of this thread's computations: it returns to let them go on, or raises to end them."""
    token = _ANSWERED.set(answer)
    try:
        yield
    finally:
        _ANSWERED.reset(token)
