"""A call of the command line, as tests see it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What a call of the command left."""

    status: int
    out: str
    err: str


Command = Callable[..., Answer]
