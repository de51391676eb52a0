"""A recipe against its rivals: predictions nominate them, and a job with the recipe as its baseline decides.

Trials, rounds and statistics are those of a sweep: the confirmation (`autotune.loop.confirmation`) measures finalists and the
recipe alternately, and the verdict (`autotune.outcome.verdict`) compares them.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.framework import LintCase
from autotune.loop.confirmation import CONFIDENCE
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import EQUAL, decide
from autotune.prediction.planning.estimate import StepEstimate
from autotune.recipes.candidates import LEVERS, Candidate, Refused, candidates, certain_gain, changed_settings, judged, realised
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.strategies.strategy import Candidates, Strategy, known_hashes
from search_spaces.knob import Value
from search_spaces.knob_values import value_text
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

FOLLOWS = (*LEVERS, "sequence_parallel", "pipeline_schedule")
"""Knobs in which a rival may differ from the recipe."""


class Result(StrEnum):
    """The answer. The values are exported: never rename one."""

    BEATEN = "beaten"
    """A rival is faster: the interval of its ratio is above 1."""
    NOT_BEATEN = "not beaten"
    """With a probability of 95 %, no rival that was tried is faster by more than 1 %."""
    UNDECIDED = "undecided"
    """Neither is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A layout that may be faster than the recipe."""

    differences: dict[str, Value]
    """Knob -> its value, of those that differ from the recipe."""
    settings: dict[str, Any]
    """The same as settings of the recipe's framework; None: left out."""
    predicted: Interval | None
    """Its samples/s over the recipe's, with a probability of 90 %; None: the recipe is not predicted."""
    measured: Interval | None = None
    """The same from trials, with a probability of 95 %; None: it was not measured to its end."""
    outcome: str = ""
    """How its first trial ended; empty: it was not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nomination:
    """The rivals of a recipe by prediction, the fastest first."""

    case: LintCase
    outlook: StepEstimate | str
    """The recipe's prediction; else why there is none."""
    rivals: tuple[Rival, ...]

    @property
    def result(self) -> Result:
        """What predictions alone say."""
        ratios = [rival.predicted for rival in self.rivals if rival.predicted is not None]
        if any(ratio.low > 1.0 for ratio in ratios):
            return Result.BEATEN
        is_predicted = isinstance(self.outlook, StepEstimate)
        return Result.NOT_BEATEN if is_predicted and all(ratio.high < 1.0 + EQUAL for ratio in ratios) else Result.UNDECIDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenged:
    """The answer by trials."""

    result: Result
    gain: Interval | None
    """Samples/s of the best rival over the recipe's, with a probability of 95 %; None: there is none to compare."""
    best: Rival | None
    """The rival that beats it."""
    rivals: tuple[Rival, ...]
    rate: Interval | None
    """Samples/s of the recipe; None: it did not run."""
    rounds: int
    """Measurements of the recipe."""
    message: str = ""
    """Why the recipe did not run; empty: it ran."""


def nominate(case: LintCase, batch: int, count: int) -> Nomination:
    """The layouts that are predicted fastest, without the recipe's own.

    Raises:
        RequestError: the model is not known.
    """
    if case.model is None:
        raise RequestError("model", f"{case.source} does not say which model it trains", "give --model MODEL")
    recipe_case = realised(case, case.config, batch) or case
    verdict = judged(recipe_case)
    outlook: StepEstimate | str = verdict if isinstance(verdict, StepEstimate) else _why(verdict)
    rivals = [candidate for candidate in candidates(case, batch, count + 1) if _differences(case.config, candidate.config)]
    factor = certain_gain(case)
    return Nomination(
        case=case, outlook=outlook, rivals=tuple(_rival(case, candidate, outlook, factor) for candidate in rivals[:count])
    )


def _why(refused: Refused) -> str:
    return str(refused.findings[0]) if refused.findings else refused.why


def _differences(recipe_config: TrialConfig, other: TrialConfig) -> dict[str, Value]:
    return {name: value for name in FOLLOWS if (value := getattr(other, name)) != getattr(recipe_config, name)}


def _rival(case: LintCase, candidate: Candidate, outlook: StepEstimate | str, factor: float) -> Rival:
    ratio = None
    if isinstance(outlook, StepEstimate):
        mean = candidate.outlook.samples_per_second.mean / outlook.samples_per_second.mean
        ratio = Interval(mean=mean, low=mean / factor, high=mean * factor)
    return Rival(
        differences=_differences(case.config, candidate.config), settings=changed_settings(case, candidate.case),
        predicted=ratio,
    )  # fmt: skip


class Nominated(Strategy):
    """Proposes given configurations, in their order."""

    def __init__(self, configs: Sequence[TrialConfig]) -> None:
        self._configs = tuple(configs)

    def propose(
        self,
        candidates: Candidates,  # noqa: ARG002  the rivals are given
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,  # noqa: ARG002
    ) -> list[TrialConfig]:
        hashes = known_hashes(history, pending)
        return [config for config in self._configs if config.hash not in hashes][:count]


def challenge_session(session: Session, nomination: Nomination) -> tuple[Session, list[tuple[TrialConfig, Rival]]]:
    """A job's session whose baseline is the recipe and whose search trials are the rivals.

    Args:
        session: with the recipe as its baseline.
        nomination: the rivals. Those that the session's engine refuses are left out.
    """
    recipe = session.baselines[0]
    offered = [(recipe.replace(rival.differences), rival) for rival in nomination.rivals]
    domains = {name: tuple(dict.fromkeys(getattr(layout, name) for layout in (recipe, *(config for config, _ in offered))))
               for name in FOLLOWS}  # fmt: skip
    request = dataclasses.replace(
        session.request,
        resolved_domains={name: values for name, values in domains.items() if len(values) > 1},
        resolved_base=recipe,
        trials=1 + len(offered),
    )
    prepared = prepare(request)
    legal = [(prepared.space.canonical(config), rival) for config, rival in offered if not prepared.space.check(config)]
    rival_of = {config: rival for config, rival in reversed(legal) if config != recipe}
    rivals = list(reversed(rival_of.items()))
    strategy = Nominated([config for config, _ in rivals])
    return dataclasses.replace(prepared, baselines=session.baselines[:1], strategy=strategy), rivals


def judge(session: Session, snapshot: JobSnapshot, rivals: Sequence[tuple[TrialConfig, Rival]]) -> Challenged:
    """The answer that the job's rows support.

    The recipe is beaten if the job's verdict is another configuration and the interval of its gain is above 1. It is not beaten
    if with the confidence of a confirmation no rival is faster by more than `EQUAL`.
    """
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    recipe = session.baselines[0]
    trial = snapshot.search_trial(recipe)
    if verdict is None or verdict.baseline is None:
        outcome = trial.outcome.value if trial and trial.outcome else "was not tried"
        message = trial.result.message if trial and trial.result else ""
        return Challenged(
            result=Result.UNDECIDED, gain=None, best=None, rivals=tuple(rival for _, rival in rivals), rate=None, rounds=0,
            message=f"the recipe itself {outcome.lower()} here: {message}",
        )  # fmt: skip
    standings = verdict.standings
    recipe_place = standings.places[verdict.baseline.config_hash]
    measured = []
    for config, rival in rivals:
        ended, rival_place = snapshot.search_trial(config), standings.places.get(config.hash)
        ratio = standings.ranked_by.ratio(rival_place, recipe_place) if rival_place is not None else None
        outcome = ended.outcome.value if ended is not None and ended.outcome is not None else ""
        measured.append(dataclasses.replace(rival, measured=ratio, outcome=outcome))
    best = next((rival for (config, _), rival in zip(rivals, measured, strict=True) if config == verdict.best.config), None)
    if not verdict.keeps and verdict.gain is not None and verdict.gain.low > 1.0:
        result = Result.BEATEN
    elif standings.ranked_by.probability_best(recipe_place, EQUAL) >= CONFIDENCE:
        result, best = Result.NOT_BEATEN, None
    else:
        result, best = Result.UNDECIDED, None
    ratios = [rival.measured for rival in measured if rival.measured is not None]
    gain = verdict.gain if best is not None else max(ratios, key=lambda ratio: ratio.mean, default=None)
    return Challenged(
        result=result, gain=gain, best=best, rivals=tuple(measured), rate=verdict.rate(verdict.baseline),
        rounds=standings.repeats[recipe_place],
    )  # fmt: skip


def rival_text(rival: Rival) -> str:
    """Its differences from the recipe."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in rival.differences.items())
