"""`--knowledge` with trials of the job's own model, batch and hardware: a study, or a table of knobs and rates."""

import dataclasses
from collections.abc import Callable

from autotune.errors import RequestError
from autotune.imports.history import read_history
from autotune.session.knowledge import admit, require_learning
from autotune.session.session import Session
from storage.address import without_password

MOST_NUMBERS = 12


def with_history(session: Session, source: str, report: Callable[[str], None]) -> Session:
    """The session with the trials that are usable; the number of others is reported by reason.

    Raises:
        RequestError: the history cannot be read, no trial is usable, or the job cannot learn from it.
    """
    require_learning(session.request, session.model)
    rows = read_history(source)
    found = admit(rows, session)
    report(f"knowledge: {len(found.trials)} of {len(rows)} trials count")
    for reason, numbers in found.refused.items():
        listed = ", ".join(map(str, numbers[:MOST_NUMBERS])) + (", …" if len(numbers) > MOST_NUMBERS else "")
        report(f"knowledge: {'trials' if len(numbers) > 1 else 'trial'} {listed} left out: {reason}")
    if not found.trials:
        problem = f"no trial of {without_password(source)} counts"
        raise RequestError("knowledge", problem, "use the names of knobs for its columns or parameters")
    return dataclasses.replace(session, request=dataclasses.replace(session.request, resolved_history=found.trials))
