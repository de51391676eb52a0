"""What the command engine honours. Imports no torch: the search reads it."""

from collections.abc import Mapping

from search_spaces.capability import Capability
from search_spaces.environment import ENVIRONMENT
from search_spaces.trial_config import Value

COMMAND = "command"
"""Name of the engine that runs a user's own script."""


def command_capability(turned: Mapping[str, tuple[Value, ...] | None]) -> Capability:
    """Of a script's command: knob -> the values that its placeholders tell apart; None: all. No other knob reaches it, but for
    the environment, which the script has from the rank that starts it."""
    return Capability(engine=COMMAND, knobs={**turned, ENVIRONMENT: None})
