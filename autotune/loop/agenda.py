"""The next measurements of a job."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from autotune.loop.confirmation import next_round
from autotune.loop.controls import last_control, next_control
from autotune.loop.environment_stage import (
    reserved_trials,
    stage_has_begun,
    stage_trials,
)
from autotune.loop.planned_trial import PlannedTrial
from autotune.loop.stopping import CommonCause, common_cause, pending_layouts, stop_of, time_is_up
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import measured_baseline
from autotune.session.session import Session
from search_spaces.knob_values import value_text
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import JobState, Outcome, StopReason
from search_spaces.training.fewer import fewer_layers, fewer_micro_batches
from search_spaces.trial_config import TrialConfig
from storage.records import FEWER, FULL, SHALLOWER

EVERY_TRIAL_FAILED = "EVERY_TRIAL_FAILED"
"""Reason of a job in which every trial failed, if the failure table has no row for the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a job has nothing more to measure."""

    reason: str
    """A StopReason if the job succeeded."""
    message: str
    state: JobState = JobState.SUCCEEDED


def next_trials(session: Session, snapshot: JobSnapshot, running: Collection[int], slots: int) -> list[PlannedTrial]:
    """Return up to `slots` measurements to start now. An empty list with nothing running means that the job is done.

    1. Trials that another process left without an outcome come first, in their order.
    2. The baseline runs with no other trial at the same time: later trials are checked against its losses, and gains are
       relative to it.
    3. The search runs the strategy's proposals until the budget is spent, with periodic control trials (`controls`).
    4. When every search trial has ended, the requested environments run on the incumbent's layout (`environment_stage`).
    5. When all of these have ended, the confirmation runs, with full steps like the baseline.

    The decision depends only on the rows, so any process can continue a job whose process was killed.
    """
    if slots < 1:
        return []
    left_open = [trial for trial in snapshot.open if trial.number not in running]
    if left_open:
        return [
            PlannedTrial(config=t.config, purpose=t.purpose, repeat=t.repeat, fidelity=t.fidelity) for t in left_open[:slots]
        ]
    # None is next if it was measured, failed for a reason other than memory, or has no ZeRO stage left to try.
    if baseline := _next_baseline(session, snapshot):
        return [] if running else baseline
    if not search_is_over(session, snapshot) and (
        planned := next_control(session, snapshot) or _proposed(session, snapshot, slots)
    ):
        return planned
    if time_is_up(session, snapshot) is None and (stage := stage_trials(session, snapshot)):
        return stage[:slots]
    return [] if running else (last_control(session, snapshot) or next_round(session, snapshot))[:slots]


def ending(session: Session, snapshot: JobSnapshot) -> Ending:
    """Return why a job with nothing more to measure has ended."""
    tried = f"{snapshot.spent} of {session.request.trials} trials"
    stop = stop_of(session, snapshot)
    if not snapshot.searched and stop is not None:
        return Ending(reason=stop.reason, message=f"{stop.message} before a trial could start")
    if not session.ranking.ranked(snapshot.searched):
        outcomes = {trial.outcome for trial in snapshot.searched}
        if not outcomes & {Outcome.OK, Outcome.INFEASIBLE, None}:
            # No trial ran or was infeasible, so the trials themselves are broken.
            return _broken(session, snapshot, tried, common_cause(snapshot))
        verb = "may win" if Outcome.OK in outcomes else "fits"
        message = f"no configuration {verb} after {tried}{_why_none(session, snapshot)}"
        return Ending(reason=StopReason.NOTHING_FEASIBLE, message=message)
    if snapshot.spent >= session.request.trials:
        return Ending(reason=StopReason.BUDGET, message=f"{tried} are spent")
    if stop is not None:
        return Ending(reason=stop.reason, message=f"{stop.message}, after {tried}")
    if snapshot.spent + reserved_trials(session, snapshot) >= session.request.trials:
        return Ending(reason=StopReason.BUDGET, message=f"{tried} are spent")
    return Ending(reason=StopReason.EXHAUSTED, message=f"every legal configuration was tried, in {tried}")


def _broken(session: Session, snapshot: JobSnapshot, tried: str, common: CommonCause | None) -> Ending:
    """The ending of a job in which every trial failed, independently of the configuration."""
    if common is None:
        message = f"every one of {tried} failed{_why_none(session, snapshot)}"
        return Ending(state=JobState.FAILED, reason=EVERY_TRIAL_FAILED, message=message)
    # A script's error message already has a remedy; for a built-in model there is nothing that the user can fix.
    first = "fix the module or its batch" if isinstance(session.model, FactoryModel) else "correct that"
    remedy = f"{first} and start it again; the first trial's traceback is in `autotune show`"
    message = f"every one of {tried} failed alike: {common.message}; {remedy}"
    return Ending(state=JobState.FAILED, reason=common.name or EVERY_TRIAL_FAILED, message=message)


def _why_none(session: Session, snapshot: JobSnapshot) -> str:
    """The outcomes of the search trials, and the remedy."""
    counts = Counter(trial.outcome for trial in snapshot.searched if trial.outcome is not None)
    if not counts:
        return ""
    outcomes = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.most_common())
    memory = "raise the memory limit, add ranks, or search a space with higher ZeRO stages"
    common = counts.most_common(1)[0][0]
    remedy = {Outcome.INFEASIBLE: memory, Outcome.OK: f"{memory}; or lower the headroom"}.get(common, "see `autotune show`")
    return f" ({outcomes}{_shortfall(session) if common is Outcome.INFEASIBLE else ''}); {remedy}"


def _shortfall(session: Session) -> str:
    """The configuration with the smallest predicted memory shortfall, and that shortfall."""
    least = session.strategy.least_memory(session.space)
    if least is None:
        return ""
    knobs = " ".join(f"{name}={value_text(value)}" for name, value in least.config.differences(session.space.base).items())
    short = f"{max(least.needed - least.room, 0.0):,.0f} bytes more than a rank has"
    return f"; closest to fitting is {knobs or 'the base'}, predicted to need {least.needed:,.0f} bytes, {short}"


def search_is_over(session: Session, snapshot: JobSnapshot) -> bool:
    """Whether the search trials are spent, the search stops early, or the environment stage has begun."""
    reserved = reserved_trials(session, snapshot)
    in_stage = reserved > 0 and stage_has_begun(session, snapshot)
    return in_stage or snapshot.spent + reserved >= session.request.trials or stop_of(session, snapshot) is not None


def is_baseline(session: Session, snapshot: JobSnapshot, config: TrialConfig) -> bool:
    """Whether this configuration is the baseline, or becomes it if it can be measured."""
    measured = measured_baseline(snapshot, session.baselines)
    return config in session.baselines if measured is None else config == measured.config


def _next_baseline(session: Session, snapshot: JobSnapshot) -> list[PlannedTrial]:
    for config in session.baselines:
        trial = snapshot.search_trial(config)
        if trial is None or trial.outcome is None:
            # Checked only here: it is expensive to compute whether further trials are worth their cost.
            return [] if search_is_over(session, snapshot) else [PlannedTrial(config=config)]
        if trial.outcome is not Outcome.INFEASIBLE:
            return []
    return []


def _proposed(session: Session, snapshot: JobSnapshot, slots: int) -> list[PlannedTrial]:
    count = min(slots, session.request.trials - snapshot.spent - reserved_trials(session, snapshot))
    history, pending = session.without_environment_stage(snapshot.searched), pending_layouts(session, snapshot)
    configs = session.strategy.propose(session.space, history, pending, count, session.request.seed)
    # A strategy that proposes only known configurations is exhausted: repeating them would never spend the budget.
    configs = [config for config in configs if snapshot.search_trial(config) is None]
    return [PlannedTrial(config=config, fidelity=_fidelity(session, snapshot, config)) for config in configs]


def _fidelity(session: Session, snapshot: JobSnapshot, config: TrialConfig) -> str:
    """Fidelity of a search trial: fewer layers or micro-batches if the request allows it and the rest can be extrapolated."""
    fidelity = session.request.fidelity
    if (fidelity.most_layers is None and fidelity.most_micro_batches is None) or is_baseline(session, snapshot, config):
        return FULL
    if fewer_layers(config, session.model, fidelity.most_layers):
        return SHALLOWER
    few = fewer_micro_batches(config, session.request.workload, session.world_size, fidelity.most_micro_batches)
    return FEWER if few else FULL
