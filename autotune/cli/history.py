"""`--history`: what was measured before, outside of the database."""

import dataclasses
from collections.abc import Callable

from autotune.errors import RequestError
from autotune.imports.history import read_history
from autotune.request.strategy_names import PREDICTING
from autotune.session.history import admit
from autotune.session.session import Session
from search_spaces.models.model import ModelSpec

MOST_NUMBERS = 12


def with_history(session: Session, source: str, tell: Callable[[str], None]) -> Session:
    """The session with the trials that count; the others are told, by reason.

    Raises:
        RequestError: the history cannot be read, none of it counts, or the job cannot learn from it.
    """
    if session.request.strategy not in PREDICTING:
        problem = f"{session.request.strategy} learns nothing before its first trial"
        raise RequestError("history", problem, "use --strategy guided, or leave it out")
    if not isinstance(session.model, ModelSpec):
        problem = f"the layers of {session.model.name} are not known, so that nothing is predicted from their shape"
        raise RequestError("history", problem, "leave it out, or give a config.json")
    rows = read_history(source)
    found = admit(rows, session)
    tell(f"history: {len(found.trials)} of {len(rows)} trials count")
    for reason, numbers in found.refused.items():
        told = ", ".join(map(str, numbers[:MOST_NUMBERS])) + (", …" if len(numbers) > MOST_NUMBERS else "")
        tell(f"history: {'trials' if len(numbers) > 1 else 'trial'} {told} left out: {reason}")
    if not found.trials:
        raise RequestError("history", f"no trial of {source} counts", "name its columns or parameters as the knobs are named")
    return dataclasses.replace(session, request=dataclasses.replace(session.request, resolved_history=found.trials))
