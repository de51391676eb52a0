"""What an explanation is made from: a job's trials, who won, and what the equations say of its candidates."""

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autotune.errors import NoBestError
from autotune.explain.explanation.forecast import Forecast
from autotune.forecast.job_question import question_of_session
from autotune.outcome.job_snapshot import JobSnapshot, read_book
from autotune.outcome.standings import with_whole_result
from autotune.outcome.verdict import Verdict, decide
from autotune.prediction.fitting.likeness import NOISE
from autotune.prediction.planning.calibrated import asked_here
from autotune.prediction.planning.question import Question
from autotune.session.resolve import session_of
from autotune.session.session import Session
from autotune.strategies.guided.described import Array, Described
from autotune.strategies.guided.prior import Prior
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from storage.store import Store


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured."""

    session: Session
    book: JobSnapshot
    verdict: Verdict
    winner: TrialRecord
    """Its search trial, with its whole result."""
    question: Question | None
    """What the equations are asked, with what the database knows of the cluster; None: the model has no shape."""
    apart: dict[int, list[str]] = field(default_factory=dict)
    """Search trial -> knobs in which it differs from the winner; empty: not found out yet (`neighbours.all_apart`)."""

    @property
    def config(self) -> TrialConfig:
        """The winner's."""
        return self.winner.config

    @cached_property
    def rate(self) -> Interval:
        """The winner's samples/s, measured."""
        return self.rate_of(self.winner)

    @cached_property
    def step_seconds(self) -> float:
        """The winner's, measured."""
        return self.session.request.global_batch_size / self.rate.mean

    def rate_of(self, trial: TrialRecord) -> Interval:
        """Samples/s of a measured search trial's configuration, as every list and document states it."""
        rate = self.verdict.rate(trial)
        assert rate is not None  # it was measured
        return rate

    def speedup(self, other: TrialRecord) -> Interval:
        """The winner's samples/s over those of another measured search trial."""
        ratio = self.verdict.standings.ratio(self.winner, other)
        assert ratio is not None  # both were measured
        return ratio

    @cached_property
    def outlook(self) -> "Outlook | None":
        """What is predicted; None: the model has no shape."""
        return None if self.question is None else Outlook(self, self.question)


class Outlook(Forecast):
    """What is predicted of any configuration, anchored at the winner: how many times as fast another configuration is, so that
    what the equations do not know of the winner is taken to hold for its neighbours, too.
    """

    def __init__(self, evidence: Evidence, question: Question) -> None:
        super().__init__(evidence.session, evidence.book, Prior(rates=question.rates, source=question.rests_on))
        self._own = float(self.belief.mean(self.describe([evidence.config]))[0])

    def log_speedups(self, described: Described) -> tuple[Array, Array]:
        """Logarithm of the winner's rate over each one's, and its standard deviation, with what no feature tells of either."""
        mean, spread = self.belief.mean_and_spread(described)
        return self._own - mean, np.hypot(spread, math.sqrt(2) * NOISE)

    def slower(self, described: Described) -> Array:
        """Logarithm of the winner's rate over each one's."""
        told: Array = self._own - self.belief.mean(described)
        return told


def gather(store: Store, job_id: str) -> Evidence:
    """Everything that the job's rows say.

    Raises:
        UnknownJobError: there is no such job.
        NoBestError: nothing won; the line says how its trials ended.
        JobNotResumableError: this version cannot read the job's request.
        SearchSpaceError: what an old job's request names is no longer there.
    """
    book = read_book(store, job_id)
    return evidence_of(store, session_of(book.job), book)


def evidence_of(store: Store, session: Session, book: JobSnapshot) -> Evidence:
    """The same of a job that is read already.

    Raises:
        NoBestError: nothing won.
    """
    verdict = decide(book, session.ranking, session.prior, session.baselines)
    if verdict is None:
        raise NoBestError("job", f"{book.job.id} has no winner to explain: {trials_text(book)}", "look at `autotune show`")
    return Evidence(
        session=session,
        book=book,
        verdict=verdict,
        winner=with_whole_result(book, verdict.best),
        question=question_of_job(store, session),
    )


def trials_text(book: JobSnapshot) -> str:
    """How trials ended: `8 trials, 5 INFEASIBLE, 3 FAILED`."""
    ended = Counter(trial.outcome.value for trial in book.searched if trial.outcome)
    count = len(book.searched)
    return ", ".join([f"{count or 'no'} trial{'s' * (count != 1)}", *(f"{n} {name}" for name, n in ended.most_common())])


def question_of_job(store: Store, session: Session) -> Question | None:
    """What the equations are asked of a job, with what the database knows of its cluster; None: its model has no shape."""
    question = question_of_session(session)
    return None if question is None else asked_here(store, question)
