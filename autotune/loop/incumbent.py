"""The incumbent: the best trial so far, which later trials race against."""

import dataclasses
import math
from itertools import islice

from autotune.loop.agenda import is_baseline
from autotune.objective.intervals import Spread
from autotune.objective.ranking import rate
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import measured_baseline
from autotune.request.job_fields import Objective
from autotune.session.session import Session
from search_spaces.models.command import CommandModel
from search_spaces.outcome import Purpose
from search_spaces.trial import TrialRequest
from storage.records import FEWER, SHALLOWER, TrialRecord


class Incumbent:
    """Tracks the best trial of a job. Each call examines only the closed trials that are new since the last call."""

    def __init__(self) -> None:
        self._seen = 0
        self._best: TrialRecord | None = None

    def best(self, session: Session, snapshot: JobSnapshot) -> TrialRecord | None:
        """The fastest search trial that can win."""
        new = [*islice(snapshot.closed.searched, self._seen, snapshot.searched_count)]
        self._seen = snapshot.searched_count
        self._best = _fastest(session, new, self._best)
        return _fastest(session, [trial for trial in snapshot.later if trial.purpose is Purpose.SEARCH], self._best)

    def with_fidelity_and_race(
        self, request: TrialRequest, trial: TrialRecord, session: Session, snapshot: JobSnapshot, spread: Spread
    ) -> TrialRequest:
        """Return the request with the trial's recorded fidelity, and with the rate that it races against.

        A search trial races if the objective is samples/s on this cluster. The baseline, confirmations and controls do not
        race: they always run to completion.
        """
        fidelity = session.request.fidelity
        best = self.best(session, snapshot)
        request = dataclasses.replace(request, command_has_reported=best is not None)
        if trial.fidelity == SHALLOWER:
            # A model with fewer layers is not comparable with the incumbent's, so there is no race.
            return dataclasses.replace(request, fidelity=dataclasses.replace(fidelity, most_micro_batches=None))
        if trial.fidelity == FEWER:
            request = dataclasses.replace(request, fidelity=dataclasses.replace(fidelity, most_layers=None))
        races = session.request.racing and session.request.objective is Objective.THROUGHPUT and not session.extrapolation
        if (
            not races
            or best is None
            or best.result is None
            or trial.purpose is not Purpose.SEARCH
            or is_baseline(session, snapshot, trial.config)
        ):
            return request
        # Both rates are single draws around the mean that many repeats would have.
        spread_of_ratio = math.sqrt(2.0 * spread.relative**2 + best.result.within_relative_error**2)
        return dataclasses.replace(
            request,
            rate_to_beat=rate(best),
            race_spread=spread_of_ratio,
            race_degrees_of_freedom=spread.degrees_of_freedom,
            race_warmup_steps=_warmup_steps(session, snapshot),
        )


def _warmup_steps(session: Session, snapshot: JobSnapshot) -> int | None:
    """Warm-up steps that say nothing about a trial's speed: of a script, as many as its baseline needed; None: all.

    A script may compile, read its data for the first time, or try kernels in its first steps, in every configuration alike.
    """
    if not isinstance(session.model, CommandModel):
        return 0
    baseline = measured_baseline(snapshot, session.baselines)
    result = None if baseline is None else snapshot.whole(baseline).result
    return None if result is None else result.warmup_steps


def _fastest(session: Session, trials: list[TrialRecord], best: TrialRecord | None) -> TrialRecord | None:
    able = [trial for trial in trials if session.ranking.may_win(trial)]
    return max(able if best is None else [best, *able], key=rate, default=None)
