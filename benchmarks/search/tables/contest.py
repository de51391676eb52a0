"""One strategy on one group: trials are answered from the table, one at a time, until the budget is spent."""

import dataclasses
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from autotune.objective.ranking import Ranking, rate
from autotune.strategies.strategy import Outlook, Strategy
from benchmarks.prediction.scoring.facts import Candidate
from benchmarks.prediction.scoring.outcomes import Fate
from benchmarks.search.tables.groups import Group
from executor.runners.replay import ReplayRunner
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

_THEN = datetime(2026, 1, 1, tzinfo=UTC)
"""Timestamp of all trials: a replay has no meaningful time."""
_MODEL = FactoryModel(reference="table:row", parameter_count=1)
_WORKLOAD = Workload(global_batch_size=1, sequence_length=1)


SURE, MARGIN = 0.95, 0.02
"""Required certainty that nothing untried is faster by more than the margin, to count as finished; the games continue."""
MOST_REFUSED = 1000
"""Number of proposals missing in the table after which a game ends: they cost nothing, so the game might never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The results of one game."""

    shares: tuple[float, ...]
    """Best found / best of the group, after each trial."""
    failed: tuple[bool, ...]
    """Whether each trial failed, for any reason."""
    out_of_memory: tuple[bool, ...]
    seconds: tuple[float, ...]
    """Duration of each decision. The first includes loading libraries and preparing data that later ones reuse."""
    sure_after: int | None = None
    """Trials after which the strategy was `SURE` that nothing untried is faster by more than `MARGIN`; None: never."""
    refused: int = 0
    """Proposals missing in the table."""
    error: str = ""
    """What ended the game early: an exception of the strategy, or a violation of its interface."""


def play(group: Group, strategy: Strategy, seed: int, trials: int) -> Played:
    """Let the strategy choose `trials` times, or until all was tried; it learns nothing of the group except its own trials.

    1. The strategy is asked for one configuration, given all trials so far; the duration is recorded.
    2. A proposal missing in the table is refused and costs no trial; a repeated one ends the game.
    3. Any other is answered from the table, at the cost of a trial.
    """
    game = _Game(group)
    seconds: list[float] = []
    error, sure_after = "", None
    while len(game.shares) < trials and not error:
        began = time.perf_counter()
        try:
            proposed = strategy.propose(group.space, tuple(game.history), (), 1, seed)
        except Exception as raised:  # any error: the other strategies continue, and the report names it
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
    """The trials so far."""

    def __init__(self, group: Group) -> None:
        self.history: list[TrialRecord] = []
        self.shares: list[float] = []
        self._group = group
        self._runner = ReplayRunner(results(group))
        self._fates = {config.hash: candidate.fate for config, candidate in zip(group.configs, group.candidates, strict=True)}
        self._asked: set[str] = set()

    def answer(self, config: TrialConfig) -> str:
        """Run or refuse the configuration. Returns the error, or an empty string."""
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
            raise TypeError("a replay returns only results")
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
    """The score that strategies maximise: throughput."""
    return Ranking().score(trial)


def results(group: Group) -> dict[str, TrialResult]:
    """The result of a trial of each configuration: from the table, without labels."""
    each = zip(group.configs, group.candidates, group.said_out_of_memory, strict=True)
    return {config.hash: _result(candidate, said) for config, candidate, said in each}


def _result(candidate: Candidate, said_out_of_memory: bool) -> TrialResult:
    if candidate.repeats:
        interval = Interval(mean=candidate.rate, low=candidate.rate, high=candidate.rate)
        return TrialResult(attempt="", outcome=Outcome.OK, samples_per_second=interval)
    outcome = Outcome.INFEASIBLE if said_out_of_memory else Outcome.FAILED
    return TrialResult(attempt="", outcome=outcome, message="the table has no time for it")


def _record(config: TrialConfig, result: TrialResult, number: int, attempts: int) -> TrialRecord:
    return TrialRecord(
        job_id="bench", number=number, config=config, config_hash=config.hash, purpose=Purpose.SEARCH, fidelity="full",
        repeat=0, counted=True, outcome=result.outcome, result=result, attempts=attempts,
        created=_THEN, started=_THEN, finished=_THEN,
    )  # fmt: skip
