"""What a job wants measured next."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from autotune.loop.confirmation import next_round
from autotune.loop.controls import last_control, next_control
from autotune.loop.environment_stage import (
    reserved_trials,
    stage_has_begun,
    stage_wants,
)
from autotune.loop.planned_trial import PlannedTrial
from autotune.loop.stopping import CommonCause, common_cause, pending_layouts, stop_of, time_is_up
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import measured_baseline
from autotune.session.session import Session
from search_spaces.fewer import fewer_layers, fewer_micro_batches
from search_spaces.knobs import value_text
from search_spaces.model import FactoryModel
from search_spaces.outcome import JobState, Outcome, StopReason
from search_spaces.trial_config import TrialConfig
from storage.records import FEWER, FULL, SHALLOWER

EVERY_TRIAL_FAILED = "EVERY_TRIAL_FAILED"
"""Reason of a job that no trial ran in, where the failure table has no name for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why nothing more is wanted."""

    reason: str
    """A StopReason where the job succeeded."""
    message: str
    state: JobState = JobState.SUCCEEDED


def next_wants(session: Session, book: JobSnapshot, running: Collection[int], room: int) -> list[PlannedTrial]:
    """Return up to `room` measurements that should start now; none, with nothing running: the job is done.

    1. What another process left without an outcome comes first, in its order.
    2. The baseline runs alone: later trials are held against its losses, and told as gain over it.
    3. The search, as the strategy proposes, until the budget is spent; the baseline again after every so many trials
       (`controls`).
    4. The environments that were asked for, when every trial of the search has ended, on its leader (`environment_stage`).
    5. The confirmation, when every one of these has ended, of full steps as the baseline is.

    All of it follows from the rows, so that any process goes on where another was killed.
    """
    if room < 1:
        return []
    left_open = [trial for trial in book.open if trial.number not in running]
    if left_open:
        return [
            PlannedTrial(config=t.config, purpose=t.purpose, repeat=t.repeat, fidelity=t.fidelity) for t in left_open[:room]
        ]
    if not baseline_is_known(session, book):
        return [] if running else _next_baseline(session, book)
    if not search_is_over(session, book) and (wanted := next_control(session, book) or _proposed(session, book, room)):
        return wanted
    if time_is_up(session, book) is None and (stage := stage_wants(session, book)):
        return stage[:room]
    return [] if running else (last_control(session, book) or next_round(session, book))[:room]


def ending(session: Session, book: JobSnapshot) -> Ending:
    """Why a job that wants nothing more has ended."""
    tried = f"{book.spent} of {session.request.trials} trials"
    stop = stop_of(session, book)
    if not book.searched and stop is not None:
        return Ending(reason=stop.reason, message=f"{stop.message} before a trial could start")
    if not session.ranking.ranked(book.searched):
        outcomes = {trial.outcome for trial in book.searched}
        if not outcomes & {Outcome.OK, Outcome.INFEASIBLE, None}:
            # Nothing was found out about what fits: the trials themselves are broken.
            return _broken(session, book, tried, common_cause(book))
        return Ending(
            reason=StopReason.NOTHING_FEASIBLE, message=f"no configuration may win after {tried}{_why_none(session, book)}"
        )
    if book.spent >= session.request.trials:
        return Ending(reason=StopReason.BUDGET, message=f"{tried} are spent")
    if stop is not None:
        return Ending(reason=stop.reason, message=f"{stop.message}, after {tried}")
    if book.spent + reserved_trials(session, book) >= session.request.trials:
        return Ending(reason=StopReason.BUDGET, message=f"{tried} are spent")
    return Ending(reason=StopReason.EXHAUSTED, message=f"every legal configuration was tried, in {tried}")


def _broken(session: Session, book: JobSnapshot, tried: str, common: CommonCause | None) -> Ending:
    """No trial ran, for a reason that no configuration has."""
    if common is None:
        message = f"every one of {tried} failed{_why_none(session, book)}"
        return Ending(state=JobState.FAILED, reason=EVERY_TRIAL_FAILED, message=message)
    # A script's error has its remedy already; of our own model there is none that a user has.
    first = "fix the module or its batch" if isinstance(session.model, FactoryModel) else "correct that"
    remedy = f"{first} and start it anew; the first trial's traceback is in `autotune show`"
    message = f"every one of {tried} failed alike: {common.message}; {remedy}"
    return Ending(state=JobState.FAILED, reason=common.name or EVERY_TRIAL_FAILED, message=message)


def _why_none(session: Session, book: JobSnapshot) -> str:
    """What became of the search trials, and the remedy."""
    counts = Counter(trial.outcome for trial in book.searched if trial.outcome is not None)
    if not counts:
        return ""
    told = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.most_common())
    memory = "raise the memory limit, add ranks, or search a space with higher ZeRO stages"
    common = counts.most_common(1)[0][0]
    remedy = {Outcome.INFEASIBLE: memory, Outcome.OK: f"{memory}; or lower the headroom"}.get(common, "see `autotune show`")
    return f" ({told}{_shortfall(session) if common is Outcome.INFEASIBLE else ''}); {remedy}"


def _shortfall(session: Session) -> str:
    """What is predicted to lack least, and by how much."""
    least = session.strategy.least_memory(session.space)
    if least is None:
        return ""
    knobs = " ".join(f"{name}={value_text(value)}" for name, value in least.config.differences(session.space.base).items())
    short = f"{max(least.needed - least.room, 0.0):,.0f} bytes a rank more than there are"
    return f"; nearest to fitting is {knobs or 'the base'}, predicted to need {least.needed:,.0f} bytes, {short}"


def search_is_over(session: Session, book: JobSnapshot) -> bool:
    """Whether the trials of the search are spent, or it ends before them, or the stage after it has begun."""
    left = reserved_trials(session, book)
    in_stage = left > 0 and stage_has_begun(session, book)
    return in_stage or book.spent + left >= session.request.trials or stop_of(session, book) is not None


def baseline_is_known(session: Session, book: JobSnapshot) -> bool:
    """Whether the baseline was measured, went wrong otherwise than by memory, or has no stage left to be tried at."""
    return not _next_baseline(session, book)


def is_baseline(session: Session, book: JobSnapshot, config: TrialConfig) -> bool:
    """Whether gains are told over this configuration, or will be if it comes out well."""
    measured = measured_baseline(book, session.baselines)
    return config in session.baselines if measured is None else config == measured.config


def _next_baseline(session: Session, book: JobSnapshot) -> list[PlannedTrial]:
    for config in session.baselines:
        trial = book.search_trial(config)
        if trial is None or trial.outcome is None:
            # Asked here alone: whether further trials are worth it is dear to tell.
            return [] if search_is_over(session, book) else [PlannedTrial(config=config)]
        if trial.outcome is not Outcome.INFEASIBLE:
            return []
    return []


def _proposed(session: Session, book: JobSnapshot, room: int) -> list[PlannedTrial]:
    count = min(room, session.request.trials - book.spent - reserved_trials(session, book))
    history, pending = session.without_environment_stage(book.searched), pending_layouts(session, book)
    configs = session.strategy.propose(session.space, history, pending, count, session.request.seed)
    # A strategy that has nothing new is at its end: what is known would be told again and again, and never be spent.
    configs = [config for config in configs if book.search_trial(config) is None]
    return [PlannedTrial(config=config, fidelity=_fidelity(session, book, config)) for config in configs]


def _fidelity(session: Session, book: JobSnapshot, config: TrialConfig) -> str:
    """Of a search trial: fewer layers, or fewer micro-batches, where the request allows them and they tell the rest."""
    asked = session.request.fidelity
    if (asked.most_layers is None and asked.most_micro_batches is None) or is_baseline(session, book, config):
        return FULL
    if fewer_layers(config, session.model, asked.most_layers):
        return SHALLOWER
    few = fewer_micro_batches(config, session.request.workload, session.world_size, asked.most_micro_batches)
    return FEWER if few else FULL
