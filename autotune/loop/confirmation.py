"""Which finalists are measured again, in which round, and when that is enough."""

from autotune.loop.planned_trial import PlannedTrial
from autotune.loop.stopping import FINALISTS
from autotune.objective.ranking import peak_bytes
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import Standings, standings_of
from autotune.outcome.verdict import candidates_of, is_baseline, is_safe, is_separated, layout_without_environment, verdict_of
from autotune.request.request import Objective
from autotune.session.session import Session
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

CONFIDENCE = 0.95
"""How sure it must be that no finalist is better than the answer."""
LEAST = 2
"""Finalists of a round: one alone is compared with nothing."""


def next_round(session: Session, book: JobSnapshot) -> list[PlannedTrial]:
    """What the round that has begun still lacks, else the next round; empty: the confirmation is over.

    Repeats go where they decide most. This is LUCB [Kalyanakrishnan et al., ICML 2012] with bounds from the posterior of rates:

    1. A round measures the leader, by the mean of its rate, and the challenger: of the others, the highest upper bound. The
       baseline is there in the first round, and in each later one as long as the leader may be worse than it, or where the
       machine drifted.
    2. Rounds end when it is `CONFIDENCE` sure that no finalist is better than the answer by more than `EQUAL`, or when as many
       measurements were made as `confirm_repeats` rounds of three have. If the seconds of the request are spent, the first
       round is the last.
    3. A leader whose step time is extrapolated is measured in full whether or not rounds are left. Where the machine drifted,
       so is each that leads and was not measured again, beside the baseline: those that lead then may be others.

    Finalists of a round take turns, so that a machine that drifts meets all of them alike. Who is in a round follows from what
    was known before it, so that any process goes on where another was killed.
    """
    begun = max((trial.repeat for trial in _confirmations(book)), default=0)
    lacking = [config for config in _round(session, book, begun) if begun not in book.confirmations(config)] if begun else []
    return [
        PlannedTrial(config=config, purpose=Purpose.CONFIRM, repeat=begun if lacking else begun + 1)
        for config in lacking or _round(session, book, begun + 1)
    ]


def starts_anew(session: Session, book: JobSnapshot, trial: TrialRecord) -> bool:
    """Whether processes are started for this trial even where warm ones could run it.

    A leader's first confirmation: its peak decides, and must not rest on what earlier trials left. A trial of an environment;
    and every confirmation where environments are finalists, for else those of the baseline alone would be of warm processes.
    """
    if trial.purpose is not Purpose.CONFIRM:
        return session.tries_environment(trial.config)
    finalists = _round(session, book, trial.repeat)
    first = trial.repeat == min(book.confirmations(trial.config), default=trial.repeat)
    return (first and trial.config in finalists[:1]) or any(session.tries_environment(one) for one in finalists)


def _round(session: Session, book: JobSnapshot, number: int) -> list[TrialConfig]:
    """The configurations of a round, the leader first, by what was known before it; empty: it is not wanted."""
    standings = standings_of(book, session.ranking, session.prior, session.baselines, before_round=number)
    if standings is None:
        return []
    trials, (leader, *others) = standings.contenders, standings.order
    own = next((place for place in others if is_baseline(standings, place)), None)
    begun = any(trial.repeat >= number for trial in _confirmations(book))
    left = FINALISTS * session.request.confirm_repeats - sum(trial.repeat < number for trial in _confirmations(book))
    finalists: list[int] = []
    if left >= LEAST and not (number > 1 and (_is_decided(standings) or (not begun and _is_over(session, book)))):
        baseline = own if number == 1 or standings.drift.found or not is_safe(standings, leader) else None
        chosen = (leader, _challenger(standings, leader, others), baseline)
        finalists = [*dict.fromkeys(place for place in chosen if place is not None)][:left]
    if len(finalists) < LEAST:
        finalists = [] if leader in candidates_of(standings) else _full_measurement(standings, leader, own)
    return [trials[place].config for place in finalists]


def _full_measurement(standings: Standings, leader: int, own: int | None) -> list[int]:
    """A round for a leader that may not be the answer as it is: where the machine drifted it is compared with the baseline,
    every leader in turn, for some come out too high, and one of before the change may lead those that were measured again; of
    extrapolated ones the first is enough."""
    if standings.drift.found:
        return [leader] if own is None else [leader, own]
    return [] if standings.confirmed - {own} else [leader]


def _challenger(standings: Standings, leader: int, others: list[int]) -> int | None:
    """Of the others the one with the highest upper bound; of an environment, its layout without it; of memory, the next."""
    plain = layout_without_environment(standings, leader)
    if plain is not None or not others:
        return plain
    if standings.ranking.objective is Objective.MEMORY:
        return others[0]
    upper = standings.ranked_by.upper()
    return max(others, key=lambda place: (upper[place], -place))


def _is_decided(standings: Standings) -> bool:
    """Whether further measurements would change nothing that anybody would notice."""
    verdict = verdict_of(standings)
    if verdict is None:
        return False
    answer = standings.places[verdict.best.config_hash]
    if standings.ranking.objective is Objective.MEMORY:
        peaks = sorted(peak_bytes(trial) for trial in standings.contenders)
        return len(peaks) < 2 or peaks[0] != peaks[1]
    return answer in standings.confirmed and is_separated(standings, answer, CONFIDENCE)


def _is_over(session: Session, book: JobSnapshot) -> bool:
    """Whether the seconds of the request are spent: one round is measured all the same, so that the gain rests on it."""
    limit = session.request.max_seconds
    return limit is not None and book.job.active_seconds >= limit


def _confirmations(book: JobSnapshot) -> list[TrialRecord]:
    """Confirmations that were wanted, without those that a person ended."""
    confirmed = (trial for trial in book.trials if trial.purpose is Purpose.CONFIRM)
    return [trial for trial in confirmed if trial.outcome is not Outcome.CANCELLED]
