"""The answer of a job: the configuration to train with, its certainty, and its gain over the baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.objective.intervals import Spread
from autotune.objective.ranking import Ranking, peak_bytes
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import Standings, is_extrapolated, standings_of, unresolved_trials
from autotune.request.job_fields import Objective
from search_spaces.environment import ENVIRONMENT
from search_spaces.outcome import Outcome, Purpose
from search_spaces.plain import to_plain
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

EQUAL = 0.01
"""Relative difference of rates that is negligible: not worth more memory or another round of measurements."""
NOT_COMPARED = (Outcome.PRUNED, Outcome.FAILED, Outcome.WRONG, Outcome.TIMEOUT)
"""Outcomes of configurations that ran, but have no rate to compare; that of a pruned one is below a bound."""
RISK = 0.02
"""Highest accepted probability that the answer is slower than the baseline by more than `EQUAL`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """The answer of a job so far."""

    best: TrialRecord
    """The answer's search trial; the baseline's if nothing is known to be better."""
    keeps: bool
    """Whether the answer is the baseline itself."""
    runner_up: TrialRecord | None
    """The other contender that is most likely to be better."""
    runner_up_ratio: Interval | None
    """Its samples/s over the answer's; None: there is no runner-up."""
    tie: bool
    """Whether the interval of that ratio includes 1; always False if memory is the objective."""
    baseline: TrialRecord | None
    """The baseline's search trial; None: no baseline was measured."""
    gain: Interval | None
    """Gain over the baseline by the objective: the ratio of samples/s, of tokens kept, or of peak bytes (baseline over answer).
    None: no baseline was measured."""
    probability_best: float | None
    """Probability that no tried configuration is better by the objective; None: there is no other, or trials are unresolved."""
    expected_loss: float
    """Expected shortfall of the answer, as a share of the best tried configuration's rate."""
    unresolved: tuple[TrialRecord, ...]
    """Search trials whose configurations may be better: their speed is unknown (`unresolved_trials`)."""
    standings: Standings

    def rate(self, trial: TrialRecord) -> Interval | None:
        """Samples/s of a search trial's configuration from all of its measurements; None: it was not measured."""
        return self.standings.rate(trial)


def decide(snapshot: JobSnapshot, ranking: Ranking, prior: Spread, baselines: Sequence[TrialConfig]) -> JobVerdict | None:
    """Return the answer that the job's rows support; None: no configuration can win.

    1. The candidates are the baseline and the configurations that can win; once the confirmation has begun, only those that
       were measured again.
    2. Drop candidates that are slower than the baseline in the mean, or slower by more than `EQUAL` with a probability above
       `RISK`. If only the baseline is left, the answer is to keep it.
    3. The answer is the candidate with the highest mean rate. Among the candidates within `EQUAL` that do not differ
       significantly from it, the one with the least memory is preferred.
    4. An environment is the answer only if its interval over the same layout without it is above 1: variables that make no
       difference are not worth setting.

    If memory is the objective, the candidates are those with the lowest peak, which repeats exactly.
    """
    standings = standings_of(snapshot, ranking, prior, baselines)
    return None if standings is None else verdict_of(standings)


def verdict_of(standings: Standings) -> JobVerdict | None:
    """`decide` for known standings; None: no contender is comparable yet."""
    candidates = candidates_of(standings)
    if not candidates:
        return None
    answer = _answer(standings, candidates)
    by_memory = standings.ranking.objective is Objective.MEMORY
    baseline, best = standings.baseline, standings.contenders[answer]
    other = _runner_up(standings, answer)
    ratio = None if other is None else standings.ranked_by.ratio(other, answer)
    unresolved = tuple(trial for trial in unresolved_trials(standings.snapshot) if trial.config_hash not in standings.places)
    probability = 1.0 if by_memory else standings.ranked_by.probability_best(answer)
    return JobVerdict(
        best=best,
        keeps=baseline is not None and best.config_hash == baseline.config_hash,
        runner_up=None if other is None else standings.contenders[other],
        runner_up_ratio=ratio,
        tie=ratio is not None and not by_memory and ratio.low <= 1.0 <= ratio.high,
        baseline=baseline,
        gain=None if baseline is None else _gain(standings, answer, baseline),
        probability_best=None if unresolved or other is None else probability,
        expected_loss=0.0 if by_memory else standings.ranked_by.expected_loss(answer),
        unresolved=unresolved,
        standings=standings,
    )


def answer_document(verdict: JobVerdict) -> dict[str, Any]:
    """Return the answer as plain data, as shown by the best-config document, the service and the page.

    Trials are given by number, rates in samples/s with their 95 % intervals. `standings` lists every contender, the answer
    first and then by rate, with the number of measurements behind its rate.
    """
    standings, best, posterior = verdict.standings, verdict.best, verdict.standings.posterior
    baseline = None if standings.baseline is None else standings.places[standings.baseline.config_hash]
    places = sorted(standings.order, key=lambda index: standings.contenders[index].config_hash != best.config_hash)
    return {
        **answer_summary(verdict),
        "standings": [
            {
                "trial": standings.contenders[index].number,
                "rate": to_plain(posterior.rate(index)),
                "repeats": standings.repeats[index],
                "over_baseline": None if baseline is None else to_plain(posterior.ratio(index, baseline)),
            }
            for index in places
        ],
    }


def answer_summary(verdict: JobVerdict) -> dict[str, Any]:
    """`answer_document` without the standings: stored in the job's row for lists of many jobs."""
    standings, best, baseline = verdict.standings, verdict.best, verdict.baseline
    of = {Objective.MEMORY: "peak_memory_bytes", Objective.GOODPUT: "goodput"}.get(
        standings.ranking.objective, "samples_per_second"
    )
    return {
        "keeps_baseline": verdict.keeps,
        "trial": best.number,
        "rate": to_plain(verdict.rate(best)),
        "baseline": None if baseline is None else baseline.number,
        "baseline_rate": None if baseline is None else to_plain(verdict.rate(baseline)),
        "gain": None if verdict.gain is None else {"of": of, **to_plain(verdict.gain)},
        "runner_up": None if verdict.runner_up is None else verdict.runner_up.number,
        "runner_up_ratio": None if verdict.runner_up_ratio is None else to_plain(verdict.runner_up_ratio),
        "tie": verdict.tie,
        "probability_best": verdict.probability_best,
        "expected_loss": verdict.expected_loss,
        "not_compared": _not_compared(verdict),
        "unresolved": [{"trial": trial.number, "rate": to_plain(verdict.rate(trial))} for trial in verdict.unresolved],
        **_goodput(verdict),
    }


def _not_compared(verdict: JobVerdict) -> dict[str, list[int]]:
    """Outcome -> search trials whose configurations were run and are no contenders, so that no probability includes them."""
    trials: dict[str, list[int]] = {}
    for trial in verdict.standings.snapshot.searched:
        if trial.config_hash not in verdict.standings.places and trial.outcome in NOT_COMPARED:
            trials.setdefault(trial.outcome.value, []).append(trial.number)
    return trials


def _goodput(verdict: JobVerdict) -> dict[str, Any]:
    """Objective goodput: the best ways to run the answer, and the best one of the baseline; empty: another objective."""
    choices_of, baseline = verdict.standings.ranking.choices_of, verdict.baseline
    if choices_of is None:
        return {}

    def documents(trial: TrialRecord) -> list[dict[str, Any]]:
        rate = verdict.rate(trial)
        return [choice.document() for choice in choices_of(trial, rate.mean)] if rate is not None else []

    of_baseline = documents(baseline)[:1] if baseline is not None else []
    return {"goodput": {"ways": documents(verdict.best), "baseline": of_baseline[0] if of_baseline else None}}


class Verdicts:
    """The current verdict of one job, recomputed only after new measurements."""

    def __init__(self) -> None:
        self._measured: tuple[int, int] | None = None
        self._verdict: JobVerdict | None = None

    def of(self, snapshot: JobSnapshot, ranking: Ranking, prior: Spread, baselines: Sequence[TrialConfig]) -> JobVerdict | None:
        """Return the result of `decide`; the same object until something new is measured."""
        ended = [trial for trial in snapshot.trials if trial.outcome is not None]
        again = sum(trial.purpose is not Purpose.SEARCH for trial in ended)
        measured = sum(trial.outcome is Outcome.OK for trial in ended), again
        if self._measured != measured:
            self._measured, self._verdict = measured, decide(snapshot, ranking, prior, baselines)
        return self._verdict


def candidates_of(standings: Standings) -> list[int]:
    """Indices of the contenders that can be the answer now: timed in full before any drift, or confirmed later."""
    places = [
        index
        for index, trial in enumerate(standings.contenders)
        if index in standings.confirmed or not (is_extrapolated(trial) or standings.drift.touches(trial.number))
    ]
    begun = [index for index in places if index in standings.confirmed and not is_baseline(standings, index)]
    if begun:
        places = [index for index in places if index in standings.confirmed or is_baseline(standings, index)]
    if standings.ranking.objective is not Objective.MEMORY or not places:
        return places
    least = min(peak_bytes(standings.contenders[index]) for index in places)
    return [index for index in places if peak_bytes(standings.contenders[index]) == least]


def is_baseline(standings: Standings, index: int) -> bool:
    """Whether the contender is the baseline."""
    return standings.baseline is not None and standings.contenders[index].config_hash == standings.baseline.config_hash


def is_safe(standings: Standings, index: int) -> bool:
    """Whether the contender is known to be at least as good as the baseline; True if there is no baseline."""
    baseline_index = None if standings.baseline is None else standings.places[standings.baseline.config_hash]
    if baseline_index is None or baseline_index == index:
        return True
    slower = standings.ranked_by.probability_slower(index, baseline_index, EQUAL)
    return slower <= RISK and standings.means[index] >= standings.means[baseline_index]


def _answer(standings: Standings, candidates: list[int]) -> int:
    baseline_index = next((index for index in candidates if is_baseline(standings, index)), None)
    safe = [index for index in candidates if baseline_index is None or is_safe(standings, index)]
    best = max(safe, key=lambda index: (standings.means[index], -index))
    alike = [index for index in safe if _is_as_good(standings, index, best)]
    if standings.ranking.objective is Objective.MEMORY:
        best = min(alike)
    else:
        best = min(alike, key=lambda index: (peak_bytes(standings.contenders[index]), -standings.means[index]))
    plain = layout_without_environment(standings, best)
    return plain if plain in safe and standings.ranked_by.ratio(best, plain).low <= 1.0 else best


def _is_as_good(standings: Standings, index: int, best: int) -> bool:
    """Whether the contender does not differ significantly from the best, and their means are within `EQUAL`."""
    if index == best:
        return True
    ratio = standings.ranked_by.ratio(best, index)
    return ratio.low <= 1.0 and ratio.mean <= 1.0 + EQUAL


def layout_without_environment(standings: Standings, index: int) -> int | None:
    """The first contender with the same layout and no environment; None: the given contender has none, or is that one."""
    config = standings.contenders[index].config
    if not config.environment:
        return None
    trials = enumerate(standings.contenders)
    alike = [other for other, trial in trials if trial.config.replace({ENVIRONMENT: config.environment}) == config]
    first = min(alike, key=lambda other: standings.contenders[other].number)
    return None if first == index else first


def _runner_up(standings: Standings, answer: int) -> int | None:
    """The other contender that is most likely better; for an answer with an environment, the same layout without it."""
    plain = layout_without_environment(standings, answer)
    if plain is not None:
        return plain
    other_indices = [index for index in standings.order if index != answer]
    if standings.ranking.objective is Objective.MEMORY:
        return next(iter(other_indices), None)
    return min(other_indices, key=lambda index: standings.ranked_by.probability_slower(index, answer), default=None)


def _gain(standings: Standings, answer: int, baseline: TrialRecord) -> Interval:
    best = standings.contenders[answer]
    if best.config_hash == baseline.config_hash:
        return Interval(mean=1.0, low=1.0, high=1.0)
    if standings.ranking.objective is Objective.MEMORY:
        # Allocator peaks repeat exactly, so the ratio has no spread.
        ratio = peak_bytes(baseline) / max(peak_bytes(best), 1)
        return Interval(mean=ratio, low=ratio, high=ratio)
    compared = standings.ranked_by if standings.ranking.objective is Objective.GOODPUT else standings.posterior
    return compared.ratio(answer, standings.places[baseline.config_hash])
