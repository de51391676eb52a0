"""The next measurements of a job, the controls that measure the baseline again, and the incumbent that trials race against."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from autotune.loop.budget import CommonCause, common_cause, pending_layouts, stop_of, time_is_up
from autotune.loop.confirmation import next_round
from autotune.loop.environment_stage import layout_begun, reserved_trials, stage_trials
from autotune.loop.trials import PlannedTrial
from autotune.objective.intervals import Spread
from autotune.objective.ranking import rate
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import Drift, measured_baseline, step_text
from autotune.request.job_fields import Objective
from autotune.session.session import Session
from search_spaces.knob_values import value_text
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import JobState, Outcome, Purpose, StopReason
from search_spaces.placeholders import follows_micro_batch
from search_spaces.shared_records import JobEvent
from search_spaces.training.fewer import fewer_layers, fewer_micro_batches
from search_spaces.trial import TrialRequest
from search_spaces.trial_config import TrialConfig
from storage.records import FEWER, FULL, SHALLOWER, Lease, TrialRecord
from storage.store import Store


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
    # Reason of a job in which every trial failed, if the failure table has no row for the cause.
    every_trial_failed = "EVERY_TRIAL_FAILED"
    if common is None:
        message = f"every one of {tried} failed{_why_none(session, snapshot)}"
        return Ending(state=JobState.FAILED, reason=every_trial_failed, message=message)
    # A script's error message already has a remedy; for a built-in model there is nothing that the user can fix.
    first = "fix the module or its batch" if isinstance(session.model, FactoryModel) else "correct that"
    remedy = f"{first} and start it again; the first trial's traceback is in `autotune show`"
    message = f"every one of {tried} failed alike: {common.message}; {remedy}"
    return Ending(state=JobState.FAILED, reason=common.name or every_trial_failed, message=message)


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
    in_stage = reserved > 0 and layout_begun(session, snapshot) is not None
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


class DriftReporter:
    """Writes an event for each change of speed. It reads earlier reports from the job's events when it first needs them."""

    _DRIFT_FOUND = "drift_found"
    """Kind of the event: a repeat of the baseline shows that the machine's speed changed."""

    def __init__(self, store: Store, report: Callable[[str], None]) -> None:
        self._store, self._report = store, report
        self._reported: int | None = None

    def report(self, lease: Lease, drift: Drift) -> None:
        """Record the changes that have no event yet. Later trials only add changes."""
        if not drift.found:
            return
        if self._reported is None:
            self._reported = sum(event.kind == self._DRIFT_FOUND for event in self._events(lease.job_id))
        for level, next_level in list(pairwise(drift.levels))[self._reported :]:
            message = step_text(level, next_level)
            trials = {"after_trial": level.last, "until_trial": next_level.first}
            self._store.events.add(lease, self._DRIFT_FOUND, {**trials, "speed": next_level.speed, "message": message})
            self._report(message)
            self._reported += 1

    def _events(self, job_id: str) -> Iterator[JobEvent]:
        after = 0
        while page := self._store.events.of(job_id, after, 1000):
            yield from page
            after = page[-1].sequence


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
            race_warmup_steps=_warmup_steps(trial.config, session, snapshot),
        )


def _warmup_steps(config: TrialConfig, session: Session, snapshot: JobSnapshot) -> int | None:
    """Steps before which a trial's speed says nothing: of a script, those with as many micro-batches as its baseline's slow
    start had; None: all.

    A script may compile, read its data for the first time, or try kernels in its first steps, for each new micro-batch.
    """
    if not isinstance(session.model, CommandModel):
        return 0
    baseline = measured_baseline(snapshot, session.baselines)
    result = None if baseline is None else snapshot.whole(baseline).result
    if baseline is None or result is None or result.warmup_steps is None:
        return None
    if follows_micro_batch(session.model):
        return result.warmup_steps
    batch, ranks = session.request.global_batch_size, session.world_size
    micro_batches = result.warmup_steps * baseline.config.gradient_accumulation_steps(batch, ranks)
    return max(result.warmup_steps, -(-micro_batches // config.gradient_accumulation_steps(batch, ranks)))


def _fastest(session: Session, trials: list[TrialRecord], best: TrialRecord | None) -> TrialRecord | None:
    able = [trial for trial in trials if session.ranking.may_win(trial)]
    return max(able if best is None else [best, *able], key=rate, default=None)
