"""Decide whether two failures are of the same kind."""

import re

from search_spaces.trial import TrialResult

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def kind_of_failure(result: TrialResult) -> tuple[str, str | None, str]:
    """Return a key that is equal for failures of the same kind: outcome, cause, and the message without its numbers.

    Ranks, shapes, sizes, ports and addresses are numbers that differ between configurations and attempts.
    """
    return result.outcome.value, result.cause, _NUMBER.sub("", result.message)
