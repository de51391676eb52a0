"""The confirmation: which finalists are measured again, in which round, and when to stop."""

from autotune.loop.budget import FINALISTS
from autotune.loop.trials import PlannedTrial
from autotune.objective.ranking import peak_bytes
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import Standings, standings_of
from autotune.outcome.verdict import EQUAL, candidates_of, is_baseline, is_safe, layout_without_environment, verdict_of
from autotune.request.job_fields import Objective
from autotune.session.session import Session
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

CONFIDENCE = 0.95
"""Required probability that no finalist is better than the answer."""


def next_round(session: Session, snapshot: JobSnapshot) -> list[PlannedTrial]:
    """Return the missing trials of the current round, else the next round; empty: the confirmation is over.

    Repeats go to the configurations that decide most. This is LUCB [Kalyanakrishnan et al., ICML 2012] with bounds from the
    posterior of rates:

    1. A round measures the incumbent (highest mean rate) and the challenger (highest upper bound among the others). The first
       round includes the baseline; later rounds include it while the incumbent may be worse, or if the machine drifted.
    2. Rounds end when, with probability `CONFIDENCE`, no finalist is better than the answer by more than `EQUAL`, or after as
       many measurements as `confirm_repeats` rounds of three. If the request's seconds are spent, the first round is the last.
    3. An incumbent with an extrapolated step time is measured in full even if no rounds are left. If the machine drifted, so is
       every incumbent that was not measured again, together with the baseline, because the order may change.

    Finalists of a round alternate, so drift affects all of them equally. A round depends only on what was known before it, so
    any process can continue a job whose process was killed.
    """
    begun = max((trial.repeat for trial in _confirmations(snapshot)), default=0)
    missing = (
        [config for config in _round(session, snapshot, begun) if begun not in snapshot.confirmations(config)] if begun else []
    )
    return [
        PlannedTrial(config=config, purpose=Purpose.CONFIRM, repeat=begun if missing else begun + 1)
        for config in missing or _round(session, snapshot, begun + 1)
    ]


def needs_fresh_processes(session: Session, snapshot: JobSnapshot, trial: TrialRecord) -> bool:
    """Whether the trial needs new processes even if warm ones could run it.

    That holds for the incumbent's first confirmation (its peak decides, and earlier trials must not influence it), for a trial
    of an environment, and for every confirmation in a round with environments (else only the baseline would run warm).
    """
    if trial.purpose is not Purpose.CONFIRM:
        return session.tries_environment(trial.config)
    finalists = _round(session, snapshot, trial.repeat)
    first = trial.repeat == min(snapshot.confirmations(trial.config), default=trial.repeat)
    return (first and trial.config in finalists[:1]) or any(session.tries_environment(config) for config in finalists)


def _round(session: Session, snapshot: JobSnapshot, number: int) -> list[TrialConfig]:
    """The configurations of a round, incumbent first, from what was known before the round; empty: it is not needed."""
    standings = standings_of(snapshot, session.ranking, session.prior, session.baselines, before_round=number)
    if standings is None:
        return []
    trials, (incumbent, *runners_up) = standings.contenders, standings.order
    baseline_position = next((position for position in runners_up if is_baseline(standings, position)), None)
    begun = any(trial.repeat >= number for trial in _confirmations(snapshot))
    remaining = FINALISTS * session.request.confirm_repeats - sum(trial.repeat < number for trial in _confirmations(snapshot))
    finalists: list[int] = []
    # Least number of finalists in a round: a single one has nothing to be compared with.
    least = 2
    if remaining >= least and not (number > 1 and (_is_decided(standings) or (not begun and _is_over(session, snapshot)))):
        baseline = baseline_position if number == 1 or standings.drift.found or not is_safe(standings, incumbent) else None
        chosen = (incumbent, _challenger(standings, incumbent, runners_up), baseline)
        finalists = [*dict.fromkeys(position for position in chosen if position is not None)][:remaining]
    if len(finalists) < least:
        finalists = [] if incumbent in candidates_of(standings) else _full_measurement(standings, incumbent, baseline_position)
    return [trials[position].config for position in finalists]


def _full_measurement(standings: Standings, incumbent: int, baseline: int | None) -> list[int]:
    """A round for an incumbent that cannot be the answer yet. After a drift, each successive incumbent is compared with the
    baseline, because some rates are overestimated and an earlier configuration may lead the confirmed ones. Of extrapolated
    incumbents, the first is enough."""
    if standings.drift.found:
        return [incumbent] if baseline is None else [incumbent, baseline]
    return [] if standings.confirmed - {baseline} else [incumbent]


def _challenger(standings: Standings, incumbent: int, runners_up: list[int]) -> int | None:
    """The contender with the highest upper bound among `runners_up`. For an environment, its layout without it; for the memory
    objective, the next in order."""
    plain = layout_without_environment(standings, incumbent)
    if plain is not None or not runners_up:
        return plain
    if standings.ranking.objective is Objective.MEMORY:
        return runners_up[0]
    upper = standings.ranked_by.upper()
    return max(runners_up, key=lambda position: (upper[position], -position))


def _is_decided(standings: Standings) -> bool:
    """Whether further measurements would not change the answer noticeably."""
    verdict = verdict_of(standings)
    if verdict is None:
        return False
    answer = standings.places[verdict.best.config_hash]
    if standings.ranking.objective is Objective.MEMORY:
        peaks = sorted(peak_bytes(trial) for trial in standings.contenders)
        return len(peaks) < 2 or peaks[0] != peaks[1]
    return answer in standings.confirmed and standings.ranked_by.probability_best(answer, EQUAL) >= CONFIDENCE


def _is_over(session: Session, snapshot: JobSnapshot) -> bool:
    """Whether the request's seconds are spent. One round still runs, so that the gain is based on repeats."""
    limit = session.request.max_seconds
    return limit is not None and snapshot.job.active_seconds >= limit


def _confirmations(snapshot: JobSnapshot) -> list[TrialRecord]:
    """Planned confirmations, without cancelled ones."""
    confirmed = (trial for trial in snapshot.trials if trial.purpose is Purpose.CONFIRM)
    return [trial for trial in confirmed if trial.outcome is not Outcome.CANCELLED]
