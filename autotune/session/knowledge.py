"""The field `knowledge` of a request: read when a job is opened, learned from when it begins."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.errors import RequestError
from autotune.request.request import JobRequest
from autotune.request.strategy_names import PREDICTING
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.model import Model, ModelSpec

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
    given = read_knowledge(source, database)
    collected = given.measurements()
    for note in (*given.notes, *collected.lines(source)):
        report(note)
    kept = thinned(collected.measurements, MOST)
    report(f"knowledge: {len(kept):,} of {len(collected.measurements):,} measurements go with the job")
    return content_of(kept)


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


def learned_of(knowledge: Any, store: "Store", cluster: ClusterSpec, engine: str) -> "Borrowed | None":
    """What predictions learn from a request's field `knowledge`; None: it has none.

    Raises:
        KnowledgeError: a field of it is damaged.
    """
    if knowledge is None:
        return None
    from autotune.knowledge.content import read_content
    from autotune.knowledge.learning import learned_from

    return learned_from(read_content(knowledge), store, cluster, engine)
