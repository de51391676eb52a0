"""When the baseline is measured again between search trials, so that a machine that drifts is noticed."""

from autotune.loop.planned_trial import PlannedTrial
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import measured_baseline
from autotune.request.request import Objective
from autotune.session.session import Session
from search_spaces.outcome import Purpose
from storage.records import TrialRecord


def next_control(session: Session, book: JobSnapshot) -> list[PlannedTrial]:
    """The baseline again, where `control_every` search trials have started since the last time."""
    every, baseline = session.request.control_every, _controlled(session, book)
    if baseline is None:
        return []
    done = len(book.controls(baseline.config))
    return [_control(baseline, done + 1)] if book.spent >= every * (done + 1) else []


def last_control(session: Session, book: JobSnapshot) -> list[PlannedTrial]:
    """The baseline again after the last search trial, where no round of confirmation will measure it anyway.

    A job of fewer than `control_every` trials has none.
    """
    baseline = _controlled(session, book)
    if baseline is None or book.spent < session.request.control_every:
        return []
    rivals = (trial for trial in book.searched if trial.config_hash != baseline.config_hash)
    if any(map(session.ranking.may_win, rivals)) and session.request.confirm_repeats:
        return []
    controls = book.controls(baseline.config)
    repeats = [baseline, *controls.values(), *book.confirmations(baseline.config).values()]
    newest = max(trial.number for trial in book.searched if trial.counted)
    return [_control(baseline, len(controls) + 1)] if max(trial.number for trial in repeats) < newest else []


def _controlled(session: Session, book: JobSnapshot) -> TrialRecord | None:
    """The baseline that is measured again; None: none is. For memory: peaks repeat exactly, whatever the machine does."""
    if not session.request.control_every or session.request.objective is Objective.MEMORY:
        return None
    return measured_baseline(book, session.baselines)


def _control(baseline: TrialRecord, repeat: int) -> PlannedTrial:
    return PlannedTrial(config=baseline.config, purpose=Purpose.CONTROL, repeat=repeat)
