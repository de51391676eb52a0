"""When two failures are of one kind."""

import re

from search_spaces.trial import TrialResult

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def kind_of_failure(result: TrialResult) -> tuple[str, str | None, str]:
    """The same for failures of one kind: outcome, cause, and the line but for its numbers.

    Ranks, shapes, sizes, ports and addresses are numbers, and differ by configuration and by attempt.
    """
    return result.outcome.value, result.cause, _NUMBER.sub("", result.message)
