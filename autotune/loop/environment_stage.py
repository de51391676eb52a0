"""The last stage of a search: a few environments on the layout that it ended with, each in processes started for it.

Processes are started anew for each, which costs more than most trials, and an environment acts on all layouts much alike. So
it is tried on the final layout alone, and out of the trials and seconds of the request: the search leaves them over.
"""

from statistics import fmean

from autotune.loop.planned_trial import PlannedTrial
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import standings_of
from autotune.session.session import Session
from search_spaces.environment import ENVIRONMENT
from search_spaces.outcome import Purpose
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


def stage_has_begun(session: Session, book: JobSnapshot) -> bool:
    """Whether the newest search trial is one of the stage: the search has ended, unless more trials were granted since."""
    return _layout_begun(session, book) is not None


def reserved_trials(session: Session, book: JobSnapshot) -> int:
    """How many of the request's trials the stage still takes."""
    count = len(session.request.resolved_environments)
    if not any(session.tries_environment(trial.config) for trial in (book.searched if count else ())):
        return count
    layout = final_layout(session, book)
    taken = [book.search_trial(config) for config in _configs(session, layout)] if layout is not None else []
    return count - sum(trial is not None and (trial.counted or trial.outcome is None) for trial in taken)


def reserved_seconds(session: Session, book: JobSnapshot) -> float:
    """How many seconds the stage still takes: of each of its trials as many as search trials took in the mean, or the first,
    whose processes were cold. What they really took has gone from it, so that time and reserve together never go back."""
    count = len(session.request.resolved_environments)
    if not count:
        return 0.0
    layouts = [_seconds(trial) for trial in session.without_environment_stage(book.searched) if _seconds(trial)]
    each = max(fmean(layouts), layouts[0]) if layouts else 0.0
    return max(count * each - sum(_seconds(trial) for trial in book.searched if session.tries_environment(trial.config)), 0.0)


def stage_wants(session: Session, book: JobSnapshot) -> list[PlannedTrial]:
    """The environments that are still to be measured on the final layout; none while a trial of the search is open."""
    searching = any(trial.purpose is Purpose.SEARCH and not session.tries_environment(trial.config) for trial in book.open)
    layout = final_layout(session, book) if session.request.resolved_environments and not searching else None
    wanted = _configs(session, layout) if layout is not None else []
    return [PlannedTrial(config=config) for config in wanted if book.search_trial(config) is None]


def final_layout(session: Session, book: JobSnapshot) -> TrialConfig | None:
    """The configuration that the stage is about: the one that it has begun with, else the leader of the search; None: none."""
    if (begun := _layout_begun(session, book)) is not None:
        return begun
    standings = standings_of(book, session.ranking, session.prior, session.baselines)
    if standings is None:
        return None
    ranked = (standings.contenders[place].config for place in standings.order)
    return next((config for config in ranked if not session.tries_environment(config)), None)


def _layout_begun(session: Session, book: JobSnapshot) -> TrialConfig | None:
    if not session.request.resolved_environments:
        return None
    searched = (trial for trial in reversed(book.trials) if trial.purpose is Purpose.SEARCH)
    newest = next((trial for trial in searched if trial.counted or trial.outcome is None), None)
    if newest is None or not session.tries_environment(newest.config):
        return None
    return newest.config.replace({ENVIRONMENT: session.environment})


def _configs(session: Session, layout: TrialConfig) -> list[TrialConfig]:
    return [layout.replace({ENVIRONMENT: environment}) for environment in session.request.resolved_environments]


def _seconds(trial: TrialRecord) -> float:
    """From start to end; 0 where it did not run."""
    return (trial.finished - trial.started).total_seconds() if trial.started and trial.finished else 0.0
