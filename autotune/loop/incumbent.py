"""The best so far, and what later trials are held against."""

import dataclasses
import math
from itertools import islice

from autotune.loop.agenda import is_baseline
from autotune.objective.intervals import Spread
from autotune.objective.ranking import rate
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.request.request import Objective
from autotune.session.session import Session
from search_spaces.outcome import Purpose
from search_spaces.trial import TrialRequest
from storage.records import FEWER, SHALLOWER, TrialRecord


class Incumbent:
    """Follows the best of a job; of closed trials only those are looked at that are new since the last time."""

    def __init__(self) -> None:
        self._looked_at = 0
        self._best: TrialRecord | None = None

    def best(self, session: Session, book: JobSnapshot) -> TrialRecord | None:
        """The fastest search trial that may win."""
        new = [*islice(book.closed.searched, self._looked_at, book.searched_count)]
        self._looked_at = book.searched_count
        self._best = _fastest(session, new, self._best)
        return _fastest(session, [trial for trial in book.later if trial.purpose is Purpose.SEARCH], self._best)

    def asked(
        self, request: TrialRequest, trial: TrialRecord, session: Session, book: JobSnapshot, spread: Spread
    ) -> TrialRequest:
        """The request with the fidelity that the trial was written down with, and the race that it is to run.

        A search trial races where samples/s of what it runs on is the objective. What is measured in full whatever comes of it
        does not: the baseline, over which every gain is told, confirmations, which decide, and controls.
        """
        asked = session.request.fidelity
        if trial.fidelity == SHALLOWER:
            # Of two models, neither of which is the one that the best is of: there is no race.
            return dataclasses.replace(request, fidelity=dataclasses.replace(asked, most_micro_batches=None))
        if trial.fidelity == FEWER:
            request = dataclasses.replace(request, fidelity=dataclasses.replace(asked, most_layers=None))
        best = self.best(session, book)
        wanted = session.request.racing and session.request.objective is Objective.THROUGHPUT and not session.extrapolation
        if (
            not wanted
            or best is None
            or best.result is None
            or trial.purpose is not Purpose.SEARCH
            or is_baseline(session, book, trial.config)
        ):
            return request
        # Both rates are draws around what their configurations would have in the mean of many repeats.
        spread_of_ratio = math.sqrt(2.0 * spread.relative**2 + best.result.within_relative_error**2)
        return dataclasses.replace(
            request,
            rate_to_beat=rate(best),
            race_spread=spread_of_ratio,
            race_degrees_of_freedom=spread.degrees_of_freedom,
        )


def _fastest(session: Session, trials: list[TrialRecord], best: TrialRecord | None) -> TrialRecord | None:
    able = [trial for trial in trials if session.ranking.may_win(trial)]
    return max(able if best is None else [best, *able], key=rate, default=None)
