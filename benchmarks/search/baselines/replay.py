"""Published procedures, re-executed from their start at every call with the results of the trials so far."""

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

from autotune.strategies.optuna_samplers import Listing
from autotune.strategies.strategy import Candidates, Score, Strategy
from autotune.strategies.walks import RandomStrategy
from search_spaces.capability import SpaceContext
from search_spaces.knob import Value
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedResult:
    """The result of a configuration that a procedure requested."""

    rate: float = 0.0
    """Samples/s; 0: it did not run, does not fit with the headroom, or does not exist."""
    out_of_memory: bool = False
    result: TrialResult | None = None
    """None: it does not exist, or is not known yet."""

    @property
    def ran(self) -> bool:
        """Whether it trains."""
        return self.rate > 0.0


Procedure = Generator[TrialConfig, ReplayedResult, None]
"""Yields the configurations it requests, and is sent the answers."""
NONEXISTENT = ReplayedResult()


class ReplayStrategy(Strategy):
    """Runs a procedure: untried requests are proposed, known ones are answered from the trials.

    1. A request that is not among the candidates is answered at once as not running, and costs nothing.
    2. A pending trial is assumed to run no faster than the fastest so far: if workers are free, the procedure continues from
       there, and is re-executed once the actual answer is known.
    3. When the procedure has ended, `random` continues.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._random = RandomStrategy()
        self.listing = Listing()

    @abstractmethod
    def procedure(self, candidates: Candidates) -> Procedure:
        """The procedure from its start; its requests are made canonical before look-up."""

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        answers = {trial.config_hash: self._answer(trial) for trial in history}
        assumed = ReplayedResult(rate=max((answer.rate for answer in answers.values()), default=0.0) or 1.0)
        answers |= {config.hash: assumed for config in pending if config.hash not in answers}
        chosen = list(islice(_requests(self.procedure(candidates), candidates, answers, assumed), count))
        further = count - len(chosen)
        return chosen + (self._random.propose(candidates, history, [*pending, *chosen], further, seed) if further else [])

    def _answer(self, trial: TrialRecord) -> ReplayedResult:
        measured = trial.result.samples_per_second if trial.result else None
        wins = self._score(trial) is not None and measured is not None
        return ReplayedResult(
            rate=measured.mean if wins and measured else 0.0,
            out_of_memory=trial.outcome is Outcome.INFEASIBLE,
            result=trial.result,
        )


def _requests(
    procedure: Procedure, candidates: Candidates, answers: dict[str, ReplayedResult], assumed: ReplayedResult
) -> Iterator[TrialConfig]:
    answer = None
    while True:
        try:
            requested = procedure.send(answer) if answer else next(procedure)
        except StopIteration:
            return
        config = candidates.admitted(requested)
        answer = answers.get(config.hash)
        if answer is None and candidates.check(config):
            answer = NONEXISTENT
        if answer is None:
            yield config
            answer = answers[config.hash] = assumed


def context_of(candidates: Candidates) -> SpaceContext | None:
    """Model, cluster and batch, if the candidates have them: a table of measurements may not."""
    context = getattr(candidates, "context", None)
    return context if isinstance(context, SpaceContext) else None


def start_of(candidates: Candidates) -> TrialConfig:
    """The user's setting: the base if it is a candidate, else the first candidate with the least model parallelism."""
    base = candidates.admitted(candidates.base)
    if not candidates.check(base):
        return base
    return min(islice(candidates.enumerate(), 10_000), key=lambda config: config.model_parallel_size, default=base)


@dataclass(frozen=True, slots=True)
class Combinations:
    """The configurations that a procedure orders."""

    candidates: Candidates
    knobs: tuple[str, ...]
    """The knobs that the procedure uses."""
    listing: Listing = field(default_factory=Listing)

    def all(self) -> list[TrialConfig]:
        """All candidates if there are few; else each existing combination of `knobs`, others at the user's setting."""
        listed = self.listing.of(self.candidates)
        if listed is not None:
            return list(listed)
        start = start_of(self.candidates)
        searched = {name: self.candidates.domains[name] for name in self.knobs if name in self.candidates.domains}
        configs: dict[TrialConfig, None] = {}
        for values in product(*searched.values()):
            config = self.candidates.admitted(start.replace(dict(zip(searched, values, strict=True))))
            if config not in configs and not self.candidates.check(config):
                configs[config] = None
        return list(configs)


def place_of(domains: Mapping[str, tuple[Value, ...]], name: str, config: TrialConfig) -> int:
    """Index of the configuration's value in a knob's domain; -1 if it is outside."""
    values, value = domains[name], getattr(config, name)
    return values.index(value) if value in values else -1
