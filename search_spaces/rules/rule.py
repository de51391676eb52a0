"""What refuses a configuration: a name, the knobs that it looks at, and what to do about it."""

from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.context import SpaceContext
from search_spaces.trial_config import TrialConfig

Check = Callable[[TrialConfig, SpaceContext], str | None]
"""What is wrong with the configuration, in one clause without the remedy; None: nothing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A legal configuration passes every rule; `check` looks at the knobs in `reads` alone."""

    name: str
    reads: tuple[str, ...]
    remedy: str
    check: Check
