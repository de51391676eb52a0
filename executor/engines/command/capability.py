"""The knobs that the command engine honours. Does not import torch, since the search reads it."""

from collections.abc import Mapping

from search_spaces.capability import Capability
from search_spaces.environment import ENVIRONMENT
from search_spaces.knob import Value

COMMAND = "command"
"""Name of the engine that runs a user's own script."""


def command_capability(turned: Mapping[str, tuple[Value, ...] | None]) -> Capability:
    """Capability of a script's command; `turned`: knob -> the values that its placeholders distinguish; None: all. No other
    knob reaches the script, except the environment, which it inherits from the rank that starts it."""
    return Capability(engine=COMMAND, knobs={**turned, ENVIRONMENT: None})
