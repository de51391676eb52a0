"""One strategy on one group: trials answered from the table, one at a time, until the budget is spent."""

import dataclasses
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from autotune.evaluation.search_benchmark.groups import Group
from autotune.evaluation.validation.facts import Candidate
from autotune.evaluation.validation.outcomes import Fate
from autotune.objective.ranking import Ranking, rate
from autotune.strategies.strategy import Outlook, Strategy
from executor.runners.replay import ReplayRunner
from search_spaces.model import FactoryModel
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

_THEN = datetime(2026, 1, 1, tzinfo=UTC)
"""When trials ran: the time of a replay means nothing."""
_MODEL = FactoryModel(reference="table:row", parameter_count=1)
_WORKLOAD = Workload(global_batch_size=1, sequence_length=1)


SURE, MARGIN = 0.95, 0.02
"""How sure a strategy must be that nothing untried is faster by more than the margin, to count as done: the games go on."""
MOST_REFUSED = 1000
"""Proposals of what the table does not have after which a game ends: they cost nothing, and must not go on for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a strategy found."""

    shares: tuple[float, ...]
    """Best found over best of the group, after each trial."""
    failed: tuple[bool, ...]
    """Whether each trial failed, for whatever cause."""
    out_of_memory: tuple[bool, ...]
    seconds: tuple[float, ...]
    """Of each decision. In the first, libraries are loaded and what is asked again and again is prepared."""
    sure_after: int | None = None
    """Trials after which the strategy was `SURE` that nothing untried is faster by more than `MARGIN`; None: never."""
    refused: int = 0
    """Proposals of what the table does not have."""
    error: str = ""
    """What ended the game before its time: what the strategy raised, or that it broke its contract."""


def play(group: Group, strategy: Strategy, seed: int, trials: int) -> Played:
    """Let the strategy choose `trials` times, or until all was tried; nothing of the group reaches it but its own trials.

    1. The strategy is asked for one configuration, with all trials so far; the time that it takes is kept.
    2. What the table does not have is refused and costs no trial; what was asked before ends the game.
    3. All else is answered by the table, at the cost of a trial.
    """
    game = _Game(group)
    seconds: list[float] = []
    error, sure_after = "", None
    while len(game.shares) < trials and not error:
        began = time.perf_counter()
        try:
            proposed = strategy.propose(group.space, tuple(game.history), (), 1, seed)
        except Exception as raised:  # whatever it is, others play on, and the report names it
            error = f"{type(raised).__name__}: {raised}"
            break
        seconds.append(time.perf_counter() - began)
        if not proposed:
            break
        error = game.answer(proposed[0])
        if sure_after is None and _is_sure(strategy.outlook(group.space, tuple(game.history), (), MARGIN)):
            sure_after = len(game.shares)
    return dataclasses.replace(game.played(seconds, " ".join(error.split())), sure_after=sure_after)


def _is_sure(expected: Outlook | None) -> bool:
    return expected is not None and expected.chance_of_more <= 1 - SURE


class _Game:
    """Trials so far."""

    def __init__(self, group: Group) -> None:
        self.history: list[TrialRecord] = []
        self.shares: list[float] = []
        self._group = group
        self._runner = ReplayRunner(results(group))
        self._fates = {config.hash: candidate.fate for config, candidate in zip(group.configs, group.candidates, strict=True)}
        self._asked: set[str] = set()

    def answer(self, config: TrialConfig) -> str:
        """Run or refuse it. Returns what is wrong with asking for it, or nothing."""
        if config.hash in self._asked:
            return "proposed a configuration twice"
        self._asked.add(config.hash)
        if refusals := self._group.space.check(config):
            refused = TrialResult(attempt="", outcome=Outcome.INVALID, rule=refusals[0].rule, message=refusals[0].message)
            self.history.append(_record(config, refused, len(self.history), attempts=0))
            return f"proposed {MOST_REFUSED} configurations that the table does not have" if self._too_many() else ""
        self._runner.submit(TrialRequest(attempt="0", model=_MODEL, config=config, workload=_WORKLOAD, world_size=1))
        [(_, result)] = self._runner.events(timeout=0.0)
        if not isinstance(result, TrialResult):
            raise TypeError("a replay answers with results alone")
        self.history.append(_record(config, dataclasses.replace(result, attempt=""), len(self.history), attempts=1))
        self.shares.append(max([*self.shares[-1:], rate(self.history[-1]) / self._group.best]))
        return ""

    def played(self, seconds: list[float], error: str) -> Played:
        ran = [trial for trial in self.history if trial.attempts]
        return Played(
            shares=tuple(self.shares),
            failed=tuple(trial.outcome is not Outcome.OK for trial in ran),
            out_of_memory=tuple(self._fates[trial.config_hash] is Fate.OUT_OF_MEMORY for trial in ran),
            seconds=tuple(seconds),
            refused=len(self.history) - len(ran),
            error=error,
        )

    def _too_many(self) -> bool:
        return sum(not trial.attempts for trial in self.history) >= MOST_REFUSED


def score(trial: TrialRecord) -> float | None:
    """What strategies make the most of: throughput."""
    return Ranking().score(trial)


def results(group: Group) -> dict[str, TrialResult]:
    """What a trial of each configuration gives: what the table says, and no label."""
    each = zip(group.configs, group.candidates, group.said_out_of_memory, strict=True)
    return {config.hash: _result(candidate, said) for config, candidate, said in each}


def _result(candidate: Candidate, said_out_of_memory: bool) -> TrialResult:
    if candidate.repeats:
        told = Interval(mean=candidate.rate, low=candidate.rate, high=candidate.rate)
        return TrialResult(attempt="", outcome=Outcome.OK, samples_per_second=told)
    outcome = Outcome.INFEASIBLE if said_out_of_memory else Outcome.FAILED
    return TrialResult(attempt="", outcome=outcome, message="the table has no time of it")


def _record(config: TrialConfig, result: TrialResult, number: int, attempts: int) -> TrialRecord:
    return TrialRecord(
        job_id="bench", number=number, config=config, config_hash=config.hash, purpose=Purpose.SEARCH, fidelity="full",
        repeat=0, counted=True, outcome=result.outcome, result=result, attempts=attempts,
        created=_THEN, started=_THEN, finished=_THEN,
    )  # fmt: skip
