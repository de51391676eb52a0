"""The last stage of a search: it tries environments on the final layout, each in new processes.

New processes cost more than most trials, and an environment affects all layouts similarly. So environments are tried only on
the final layout. Their trials and seconds are part of the request's budget: the search reserves them.
"""

from statistics import fmean

from autotune.loop.trials import PlannedTrial
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import standings_of
from autotune.session.session import Session
from search_spaces.environment import ENVIRONMENT
from search_spaces.outcome import Purpose
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


def reserved_trials(session: Session, snapshot: JobSnapshot) -> int:
    """How many of the request's trials the stage still needs."""
    count = len(session.request.resolved_environments)
    if not any(session.tries_environment(trial.config) for trial in (snapshot.searched if count else ())):
        return count
    layout = final_layout(session, snapshot)
    records = [snapshot.search_trial(config) for config in _configs(session, layout)] if layout is not None else []
    return count - sum(trial is not None and (trial.counted or trial.outcome is None) for trial in records)


def reserved_seconds(session: Session, snapshot: JobSnapshot) -> float:
    """How many seconds the stage still needs. Each of its trials is estimated at the mean duration of search trials, or at that
    of the first trial (cold processes) if longer. Time that the stage has used is subtracted, so used plus reserved time never
    decreases."""
    count = len(session.request.resolved_environments)
    if not count:
        return 0.0
    layouts = [_seconds(trial) for trial in session.without_environment_stage(snapshot.searched) if _seconds(trial)]
    seconds_per_trial = max(fmean(layouts), layouts[0]) if layouts else 0.0
    return max(
        count * seconds_per_trial
        - sum(_seconds(trial) for trial in snapshot.searched if session.tries_environment(trial.config)),
        0.0,
    )


def stage_trials(session: Session, snapshot: JobSnapshot) -> list[PlannedTrial]:
    """The environments still to be measured on the final layout; none while a search trial is open."""
    searching = any(trial.purpose is Purpose.SEARCH and not session.tries_environment(trial.config) for trial in snapshot.open)
    layout = final_layout(session, snapshot) if session.request.resolved_environments and not searching else None
    configs = _configs(session, layout) if layout is not None else []
    return [PlannedTrial(config=config) for config in configs if snapshot.search_trial(config) is None]


def final_layout(session: Session, snapshot: JobSnapshot) -> TrialConfig | None:
    """The layout that the stage uses: the one it began with, else the best of the search; None: there is none."""
    if (begun := layout_begun(session, snapshot)) is not None:
        return begun
    standings = standings_of(snapshot, session.ranking, session.prior, session.baselines)
    if standings is None:
        return None
    ranked = (standings.contenders[position].config for position in standings.order)
    return next((config for config in ranked if not session.tries_environment(config)), None)


def layout_begun(session: Session, snapshot: JobSnapshot) -> TrialConfig | None:
    """The layout of the newest search trial if that belongs to the stage: the search has ended, unless the budget was extended
    since."""
    if not session.request.resolved_environments:
        return None
    searched = (trial for trial in reversed(snapshot.trials) if trial.purpose is Purpose.SEARCH)
    newest = next((trial for trial in searched if trial.counted or trial.outcome is None), None)
    if newest is None or not session.tries_environment(newest.config):
        return None
    return newest.config.replace({ENVIRONMENT: session.environment})


def _configs(session: Session, layout: TrialConfig) -> list[TrialConfig]:
    return [layout.replace({ENVIRONMENT: environment}) for environment in session.request.resolved_environments]


def _seconds(trial: TrialRecord) -> float:
    """Duration from start to end; 0 if it did not run."""
    return (trial.finished - trial.started).total_seconds() if trial.started and trial.finished else 0.0
