"""What a job learns from: the field `knowledge` of its request, and earlier trials that are legal in its space."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.errors import RequestError
from autotune.frameworks.history import EarlierRow
from autotune.request.component_names import PREDICTING
from autotune.request.request import JobRequest
from autotune.session.session import Session
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.errors import SearchSpaceError
from search_spaces.knob_values import check_value, parse_value
from search_spaces.models.model import Model, ModelSpec
from search_spaces.trial import EarlierTrial
from search_spaces.trial_config import TrialConfig

if TYPE_CHECKING:
    from autotune.prediction.planning.calibrated import Borrowed
    from storage.store import Store

MOST = 1_000
"""Measurements in a request: of more, as many of each source."""


def with_knowledge(request: JobRequest, report: Callable[[str], None], database: str | None = None) -> JobRequest:
    """The request with the measurements that it names; unchanged if it names none. See `knowledge_content`."""
    if not isinstance(request.knowledge, str):
        return request
    return dataclasses.replace(request, knowledge=knowledge_content(request.knowledge, report, database))


def knowledge_content(source: str, report: Callable[[str], None], database: str | None = None) -> dict[str, Any]:
    """The measurements that a user names, as a request holds them.

    Args:
        source: a table, a log, a job of the database, or the address of a table.
        report: receives a line for everything that is left out.
        database: has the job; None: the default one.

    Raises:
        KnowledgeError, MeasurementsError, LookupError: they cannot be read.
    """
    from autotune.knowledge.content import content_of
    from autotune.knowledge.learning import thinned
    from autotune.knowledge.read import is_history, read_knowledge
    from storage.address import without_password

    if is_history(source):
        problem = f"{without_password(source)} has trials without their model and hardware"
        raise RequestError("knowledge", problem, "give it to `autotune sweep`, or give a table or a job")
    knowledge = read_knowledge(source, database)
    collected = knowledge.measurements()
    for note in (*knowledge.notes, *collected.lines(source)):
        report(note)
    measurements = thinned(collected.measurements, MOST)
    report(f"knowledge: {len(measurements):,} of {len(collected.measurements):,} measurements go with the job")
    return content_of(measurements)


def require_knowledge(request: JobRequest, model: Model) -> None:
    """Refuse measurements that cannot be read or learned from.

    Raises:
        RequestError: the job cannot learn from measurements.
        KnowledgeError: a field of them is damaged.
    """
    if request.knowledge is None:
        return
    require_learning(request, model)
    if isinstance(request.knowledge, str):
        raise RequestError("knowledge", f"{request.knowledge[:60]!r} is not read here", "give settings and measurements")
    from autotune.knowledge.content import read_content

    read_content(request.knowledge)


def require_learning(request: JobRequest, model: Model) -> None:
    """Refuse a job that cannot learn from measurements.

    Raises:
        RequestError: its strategy predicts nothing, or its model cannot be predicted.
    """
    if request.strategy not in PREDICTING:
        problem = f"{request.strategy} does not use earlier trials"
        raise RequestError("knowledge", problem, "use --strategy guided, or leave it out")
    if not isinstance(model, ModelSpec):
        problem = f"the layers of {model.name} are unknown, so their cost cannot be predicted"
        raise RequestError("knowledge", problem, "leave it out, or give a config.json")


def learned_of(knowledge: Any, store: "Store", cluster: ClusterSpec, engine: str, model: Any) -> "Borrowed | None":
    """What predictions learn from a request's field `knowledge`; None: it has none.

    Raises:
        KnowledgeError: a field of it is damaged.
    """
    if knowledge is None:
        return None
    from autotune.knowledge.content import read_content
    from autotune.knowledge.learning import learned_from

    return learned_from(read_content(knowledge), store, cluster, engine, model)


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
        admission = _admitted(row, session)
        if isinstance(admission, EarlierTrial):
            trials.append(admission)
        else:
            refused.setdefault(admission, []).append(row.number)
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
    return max(math.log(high / low) / (2 * 1.96), session.prior.relative)
