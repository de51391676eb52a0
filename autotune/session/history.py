"""Select the earlier trials that a job learns from: those that are legal configurations of its space."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.imports.history import EarlierRow
from autotune.request.earlier_trial import EarlierTrial
from autotune.session.session import Session
from search_spaces.errors import SearchSpaceError
from search_spaces.knob_values import check_value, parse_value
from search_spaces.trial_config import TrialConfig

NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The usable trials, and why the other rows are refused."""

    trials: tuple[EarlierTrial, ...]
    refused: dict[str, list[int]]
    """Reason -> numbers of the rows."""


def admit(rows: Sequence[EarlierRow], session: Session) -> Admitted:
    """Sort the rows into usable and refused. Rows do not state model, batch and hardware, so these are not checked."""
    trials, refused = [], dict[str, list[int]]()
    for row in rows:
        found = _admitted(row, session)
        if isinstance(found, EarlierTrial):
            trials.append(found)
        else:
            refused.setdefault(found, []).append(row.number)
    return Admitted(trials=tuple(trials), refused=refused)


def _admitted(row: EarlierRow, session: Session) -> EarlierTrial | str:
    """The trial, or why it is refused."""
    if row.rate is None or row.rate <= 0:
        return f"no rate was measured ({row.state})" if row.state else "no rate was measured"
    if not row.parameters:
        return "names no knob"
    try:
        config = _config(row, session)
    except SearchSpaceError as error:
        return f"{error.field}: {error.problem}"
    if refusals := session.space.check(config):
        return f"is refused by {refusals[0].rule}: {refusals[0].message}"
    return EarlierTrial(
        config=config, samples_per_second=row.rate, noise=_noise(row, session), peak_memory_bytes=row.peak_memory_bytes
    )


def _config(row: EarlierRow, session: Session) -> TrialConfig:
    """The row's configuration. Knobs that it does not name have the values of the space's base."""
    values = {
        name: parse_value(name, value) if isinstance(value, str) else check_value(name, value)
        for name, value in row.parameters.items()
    }
    return session.space.canonical(session.space.base.replace(values))


def _noise(row: EarlierRow, session: Session) -> float:
    """Relative standard deviation from the row's interval, but at least that between repeats on such a machine."""
    if row.interval is None:
        return session.prior.relative
    low, high = row.interval
    return max(math.log(high / low) / (2 * NORMAL_95), session.prior.relative)
