"""One strategy on one group: trials answered from the table, one at a time, until the budget is spent."""

import dataclasses
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from autotune.objective import Ranking
from autotune.search_benchmark.groups import Group
from autotune.strategies.strategy import Strategy
from autotune.validation.facts import Candidate
from autotune.validation.outcomes import Fate
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a strategy found."""

    shares: tuple[float, ...]
    """Best found over best of the group, after each trial."""
    failed: tuple[bool, ...]
    """Whether each trial failed, for whatever cause."""
    out_of_memory: tuple[bool, ...]
    first_seconds: float
    """Of deciding on the first trial: libraries are loaded, and candidates described."""
    seconds: tuple[float, ...]
    """Of each later decision."""


def play(group: Group, strategy: Strategy, seed: int, trials: int) -> Played:
    """Let the strategy choose `trials` times, or until all was tried; nothing of the group reaches it but its own trials."""
    runner = ReplayRunner(results(group))
    fates = {config.hash: candidate.fate for config, candidate in zip(group.configs, group.candidates, strict=True)}
    history: list[TrialRecord] = []
    shares: list[float] = []
    seconds: list[float] = []
    while len(history) < trials:
        began = time.perf_counter()
        proposed = strategy.propose(group.space, history, (), 1, seed)
        seconds.append(time.perf_counter() - began)
        if not proposed:
            break
        history.append(_run(runner, proposed[0], len(history)))
        shares.append(max((_rate(trial) for trial in history), default=0.0) / group.best)
    runner.close()
    return Played(
        shares=tuple(shares),
        failed=tuple(trial.outcome is not Outcome.OK for trial in history),
        out_of_memory=tuple(fates[trial.config_hash] is Fate.OUT_OF_MEMORY for trial in history),
        first_seconds=seconds[0],
        seconds=tuple(seconds[1:]),
    )


def score(trial: TrialRecord) -> float | None:
    """What strategies make the most of: throughput."""
    return Ranking().score(trial)


def results(group: Group) -> dict[str, TrialResult]:
    """What a trial of each configuration gives."""
    return {config.hash: _result(candidate) for config, candidate in zip(group.configs, group.candidates, strict=True)}


def _result(candidate: Candidate) -> TrialResult:
    if candidate.repeats:
        rate = Interval(mean=candidate.rate, low=candidate.rate, high=candidate.rate)
        return TrialResult(attempt="", outcome=Outcome.OK, samples_per_second=rate)
    # What a label derived is for scores: a trial shows what the table says.
    outcome = Outcome.INFEASIBLE if candidate.fate is Fate.OUT_OF_MEMORY else Outcome.FAILED
    return TrialResult(attempt="", outcome=outcome, message=f"the table says: {candidate.fate}")


def _run(runner: ReplayRunner, config: TrialConfig, number: int) -> TrialRecord:
    request = TrialRequest(attempt=str(number), model=_MODEL, config=config, workload=_WORKLOAD, world_size=1)
    runner.submit(request)
    [(_, result)] = runner.events(timeout=0.0)
    if not isinstance(result, TrialResult):
        raise TypeError("a replay answers with results alone")
    return TrialRecord(
        job_id="bench", number=number, config=config, config_hash=config.hash, purpose=Purpose.SEARCH, fidelity="full",
        repeat=0, counted=True, outcome=result.outcome, result=dataclasses.replace(result, attempt=""), attempts=1,
        created=_THEN, started=_THEN, finished=_THEN,
    )  # fmt: skip


def _rate(trial: TrialRecord) -> float:
    measured = trial.result.samples_per_second if trial.result is not None else None
    return measured.mean if measured is not None else 0.0
