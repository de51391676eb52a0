"""A rule that refuses configurations: its name, the knobs that it reads, and the remedy."""

from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.context import SpaceContext
from search_spaces.trial_config import TrialConfig

Check = Callable[[TrialConfig, SpaceContext], str | None]
"""Returns the problem of the configuration in one clause without the remedy; None: no problem."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A legal configuration passes every rule; `check` reads only the knobs in `reads`."""

    name: str
    reads: tuple[str, ...]
    remedy: str
    check: Check
