"""Series of jobs that compare sizes: the cheapest size, the fewest devices, the longest sequence, and how the rate grows with
the ranks.

A job has one world size and one sequence length, so that its trials are comparable. A series runs one job after the other.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from autotune.errors import DoesNotFitError, NothingFeasibleError, RequestError
from autotune.request.job_fields import Objective
from autotune.request.rows import request_from_fields
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.tuning import TuneResult
from search_spaces.outcome import JobState
from search_spaces.plain import to_plain
from search_spaces.trial import Interval

STEP = 128
"""Default precision of the longest sequence, in tokens."""


class SeriesObjective(StrEnum):
    """The objective of a series of jobs."""

    COST = "cost"
    """The number of ranks at which a token is cheapest."""
    DEVICES = "devices"
    """The fewest ranks that reach a rate."""
    SEQUENCE = "sequence"
    """The longest samples that some configuration can run."""
    SCALE = "scale"
    """How samples/s of the best configuration grow with the ranks, at one global batch (strong scaling)."""


@dataclass(frozen=True, kw_only=True)
class SeriesRequest:
    """The request of a series.

    Raises:
        RequestError: a field is missing, outside its range, or does not match the objective.
    """

    objective: SeriesObjective
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of each job's request except `objective` and `ranks`."""
    ranks: tuple[int, ...] = ()
    """Number of ranks of each job; objective `sequence`: at most one number."""
    price: float | None = None
    """Objective `cost`: price of a device per hour, in any currency."""
    rate: float | None = None
    """Objective `devices`: the samples/s to reach."""
    step: int | None = None
    """Objective `sequence`: precision of the answer in tokens; None: `STEP`."""

    def __post_init__(self) -> None:
        if self.objective not in list(SeriesObjective):
            raise RequestError("objective", f"{self.objective!r} is not a series", f"use one of {', '.join(SeriesObjective)}")
        object.__setattr__(self, "objective", SeriesObjective(self.objective))
        self._require_own("price", SeriesObjective.COST, "give what a device costs for an hour (--price)")
        self._require_own("rate", SeriesObjective.DEVICES, "give the samples/s to reach (--rate)")
        self._require_own("step", SeriesObjective.SEQUENCE, None)
        self._require_ranks()
        if self.fields.get("answer_for") or self.fields.get("tune_on"):
            raise RequestError("answer_for", f"does not go with the objective {self.objective}", "leave it out")

    def _require_own(self, name: str, owner: SeriesObjective, remedy: str | None) -> None:
        value = getattr(self, name)
        if value is None:
            if self.objective is owner and remedy is not None:
                raise RequestError(name, f"is missing for the objective {owner}", remedy)
            return
        if self.objective is not owner:
            raise RequestError(name, f"belongs to the objective {owner}", "leave it out, or choose that objective")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (value > 0 and math.isfinite(value)) or (name == "step" and not isinstance(value, int)):
            raise RequestError(name, f"{value!r} is not positive", "give a positive number")

    def _require_ranks(self) -> None:
        whole = all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in self.ranks)
        if not whole or len(set(self.ranks)) != len(self.ranks):
            ranks_text = ",".join(map(str, self.ranks))
            raise RequestError("ranks", f"{ranks_text} are not different whole numbers of 1 or more", "give for example 1,2,4")
        if self.objective is SeriesObjective.SEQUENCE:
            if len(self.ranks) > 1:
                raise RequestError("ranks", "has several values for the objective sequence", "give one, or leave it out")
        elif not self.ranks:
            raise RequestError("ranks", f"is missing for the objective {self.objective}", "give the sizes, for example 1,2,4")

    def session(self, **changes: Any) -> Session:
        """Resolve and check the job with these fields. Raises what `prepare` raises."""
        return prepare(request_from_fields({**self.fields, **changes}))


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesEntry:
    """One size of a series."""

    ranks: int
    sequence_length: int
    nodes: int = 1
    """Number of nodes that the ranks are spread over."""
    job_id: str | None = None
    """None: it was skipped."""
    samples_per_second: Interval | None = None
    """Rate of the best configuration; None: no configuration can win."""
    cost: Interval | None = None
    """Cost of a million tokens; None: no price is known, or no configuration can win."""
    efficiency: Interval | None = None
    """Objective `scale`: samples/s per rank relative to the smallest size; None: unknown."""
    message: str = ""
    """Why the job ended, or why there was no job."""
    result: TuneResult | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "ranks": self.ranks,
            "nodes": self.nodes,
            "sequence_length": self.sequence_length,
            "job": self.job_id,
            "samples_per_second": to_plain(self.samples_per_second),
            "cost_per_million_tokens": to_plain(self.cost),
            "efficiency": to_plain(self.efficiency),
            "message": self.message,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesResult:
    """The result of a series."""

    objective: SeriesObjective
    entries: tuple[SeriesEntry, ...]
    """In the order in which they were run or skipped."""
    answer: SeriesEntry | None
    """None: nothing was found, or the series was interrupted."""
    message: str
    """The answer in words; without an answer, the best that was reached and the remedy."""
    interrupted: bool = False

    @property
    def best_config(self) -> dict[str, Any] | None:
        """The best-config document of the answer."""
        return self.answer.result.best_config if self.answer is not None and self.answer.result is not None else None

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "objective": self.objective.value,
            "message": self.message,
            "interrupted": self.interrupted,
            "answer": self.answer.document() if self.answer is not None else None,
            "entries": [entry.document() for entry in self.entries],
            "best_config": self.best_config,
        }


class SizeForecast(Protocol):
    """Predictions for sizes."""

    def rate(self, session: Session) -> Interval | None:
        """Samples/s of the best configuration of a job, with its band; None: it cannot be predicted."""
        ...

    def longest(self, session: Session) -> int | None:
        """Tokens of the longest samples that fit; None: it cannot be predicted."""
        ...


Sweep = Callable[[Session], TuneResult]
"""A function that runs a job to its end."""


def entry_of(series: SeriesRequest, session: Session, result: TuneResult) -> SeriesEntry:
    """Make the entry of a job's size from its result."""
    measured = result.best_config["best"]["measured"]["samples_per_second"] if result.best_config else None
    rate = Interval(**measured) if measured else None
    return SeriesEntry(
        ranks=session.world_size, sequence_length=session.request.sequence_length, nodes=session.cluster.nodes,
        job_id=result.job_id, samples_per_second=rate, cost=cost_of(series, session, rate), message=result.message,
        result=result,
    )  # fmt: skip


def interrupted(series: SeriesRequest, entries: list[SeriesEntry]) -> SeriesResult | None:
    """The partial result of the series if its last job was stopped; else None."""
    last = entries[-1].result if entries else None
    if last is None or last.state in (JobState.SUCCEEDED, JobState.FAILED):
        return None
    message = f"stopped in job {last.job_id} ({last.state}); resume that job, or run the series again"
    return SeriesResult(objective=series.objective, entries=tuple(entries), answer=None, message=message, interrupted=True)


def sizes(series: SeriesRequest, entries: list[SeriesEntry]) -> Iterator[Session]:
    """Return the sessions, ascending, all checked before the first runs. Sizes where the model cannot fit become entries."""
    sessions = []
    for count in sorted(series.ranks):
        try:
            sessions.append(series.session(ranks=count, objective=Objective.THROUGHPUT))
        except (DoesNotFitError, NothingFeasibleError) as error:
            entries.append(skipped(count, request_from_fields(series.fields).sequence_length, f"skipped: {error}"))
    return iter(sessions)


def skipped(ranks: int, sequence_length: int, why: str) -> SeriesEntry:
    return SeriesEntry(ranks=ranks, sequence_length=sequence_length, message=why)


def cost_of(series: SeriesRequest, session: Session, rate: Interval | None) -> Interval | None:
    """Cost of a million tokens at this rate. Cost falls as the rate rises, so the bounds swap."""
    if series.price is None or rate is None:
        return None
    hourly = series.price * session.world_size
    mean, low, high = (
        hourly / 3600 / (samples_per_second * session.request.sequence_length) * 1e6 if samples_per_second > 0 else math.inf
        for samples_per_second in (rate.mean, rate.high, rate.low)
    )
    return Interval(mean=mean, low=low, high=high)
