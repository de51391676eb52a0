"""Drift of the machine: control trials measure the baseline again, and each drift is reported once per job."""

from collections.abc import Callable, Iterator
from itertools import pairwise

from autotune.loop.planned_trial import PlannedTrial
from autotune.outcome.drift import Drift, step_text
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import measured_baseline
from autotune.request.request import Objective
from autotune.session.session import Session
from search_spaces.outcome import Purpose
from search_spaces.shared_records import JobEvent
from storage.records import Lease, TrialRecord
from storage.store import Store


def next_control(session: Session, snapshot: JobSnapshot) -> list[PlannedTrial]:
    """Repeat the baseline if `control_every` search trials have started since its last measurement."""
    every, baseline = session.request.control_every, _controlled(session, snapshot)
    if baseline is None:
        return []
    done = len(snapshot.controls(baseline.config))
    return [_control(baseline, done + 1)] if snapshot.spent >= every * (done + 1) else []


def last_control(session: Session, snapshot: JobSnapshot) -> list[PlannedTrial]:
    """Repeat the baseline after the last search trial, unless a confirmation round will measure it anyway.

    A job with fewer than `control_every` trials has no control.
    """
    baseline = _controlled(session, snapshot)
    if baseline is None or snapshot.spent < session.request.control_every:
        return []
    rivals = (trial for trial in snapshot.searched if trial.config_hash != baseline.config_hash)
    if any(map(session.ranking.may_win, rivals)) and session.request.confirm_repeats:
        return []
    controls = snapshot.controls(baseline.config)
    repeats = [baseline, *controls.values(), *snapshot.confirmations(baseline.config).values()]
    newest = max(trial.number for trial in snapshot.searched if trial.counted)
    return [_control(baseline, len(controls) + 1)] if max(trial.number for trial in repeats) < newest else []


def _controlled(session: Session, snapshot: JobSnapshot) -> TrialRecord | None:
    """The baseline to repeat; None: the job has no controls. The memory objective needs none, since peaks repeat exactly."""
    if not session.request.control_every or session.request.objective is Objective.MEMORY:
        return None
    return measured_baseline(snapshot, session.baselines)


def _control(baseline: TrialRecord, repeat: int) -> PlannedTrial:
    return PlannedTrial(config=baseline.config, purpose=Purpose.CONTROL, repeat=repeat)


DRIFT_FOUND = "drift_found"
"""Kind of the event: a repeat of the baseline shows that the machine's speed changed."""
PAGE = 1000


class DriftReporter:
    """Writes an event for each change of speed. It reads earlier reports from the job's events when it first needs them."""

    def __init__(self, store: Store, report: Callable[[str], None]) -> None:
        self._store, self._report = store, report
        self._reported: int | None = None

    def report(self, lease: Lease, drift: Drift) -> None:
        """Record the changes that have no event yet. Later trials only add changes."""
        if not drift.found:
            return
        if self._reported is None:
            self._reported = sum(event.kind == DRIFT_FOUND for event in self._events(lease.job_id))
        for level, next_level in list(pairwise(drift.levels))[self._reported :]:
            message = step_text(level, next_level)
            trials = {"after_trial": level.last, "until_trial": next_level.first}
            self._store.events.add(lease, DRIFT_FOUND, {**trials, "speed": next_level.speed, "message": message})
            self._report(message)
            self._reported += 1

    def _events(self, job_id: str) -> Iterator[JobEvent]:
        after = 0
        while page := self._store.events.of(job_id, after, PAGE):
            yield from page
            after = page[-1].sequence
