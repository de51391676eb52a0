"""Control trials: the baseline is measured again between search trials, to detect drift of the machine."""

from autotune.loop.planned_trial import PlannedTrial
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import measured_baseline
from autotune.request.request import Objective
from autotune.session.session import Session
from search_spaces.outcome import Purpose
from storage.records import TrialRecord


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
