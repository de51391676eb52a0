"""Optuna's samplers (TPE, Gaussian process, NSGA-II) as strategies: a study rebuilt from the trials at each call.

An optimizer sees knobs as axes and knows no constraints; `AdviserStrategy` makes a strategy of any such optimizer.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.strategies.strategy import UNINFORMATIVE, Candidates, Score, Strategy, known_hashes
from autotune.strategies.walks import RandomStrategy
from search_spaces.knob import Value
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig, stable_hash
from storage.records import TrialRecord


class Axes:
    """The knobs with more than one value; converts between positions on the axes and configurations.

    Sizes span orders of magnitude, so a number is represented by its index in the domain.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._domains = {name: tuple(values) for name, values in candidates.domains.items() if len(values) > 1}
        self.sizes: Mapping[str, int] = {name: len(values) for name, values in self._domains.items()}
        self.ordered = frozenset(name for name, values in self._domains.items() if _is_ordered(values))
        """The axes whose neighbouring positions have similar values."""

    def config(self, places: Mapping[str, int]) -> TrialConfig:
        """The nearest canonical configuration of the domains, legal or not."""
        values = {name: self._domains[name][index] for name, index in places.items()}
        return self._candidates.admitted(self._candidates.base.replace(values))

    def places(self, config: TrialConfig) -> dict[str, int]:
        """Return the position of the configuration on each axis."""
        return {name: _place(values, getattr(config, name)) for name, values in self._domains.items()}

    def nearest(self, places: Mapping[str, int], configs: Iterable[TrialConfig], seed: int) -> TrialConfig | None:
        """The configuration nearest to a position; the seed breaks ties."""
        return min(configs, key=lambda config: (self._distance(places, config), stable_hash([seed, config.hash])), default=None)

    def _distance(self, places: Mapping[str, int], config: TrialConfig) -> float:
        """Sum of squares: on an ordered axis the difference as a share of its length; 1 between different categories."""
        theirs = self.places(config)
        return sum(
            ((index - theirs[name]) / (self.sizes[name] - 1)) ** 2 if name in self.ordered else float(index != theirs[name])
            for name, index in places.items()
        )


class Listing:
    """The configurations of a small space, listed once."""

    def __init__(self) -> None:
        self._listed: dict[str, tuple[TrialConfig, ...] | None] = {}

    def of(self, candidates: Candidates) -> tuple[TrialConfig, ...] | None:
        """All configurations; None: there are more than 3,000, of which finding the nearest one would take longer than a few
        milliseconds."""
        if candidates.hash not in self._listed:
            few = candidates.count() <= 3_000
            self._listed[candidates.hash] = tuple(candidates.enumerate()) if few else None
        return self._listed[candidates.hash]


def _is_ordered(values: Sequence[Value]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _place(values: Sequence[Value], value: Value) -> int:
    """Index of the value, or of the nearest one: a canonical configuration has clipped sizes and defaults for unused knobs."""
    if value in values:
        return values.index(value)
    if not _is_ordered(values) or isinstance(value, str):
        return 0
    return min(range(len(values)), key=lambda index: abs(float(values[index]) - float(value)))


STARTUP_TRIALS = 8
"""Trials that `random` chooses before the optimizer has data to learn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTrial:
    """A finished trial as it is passed to the optimizer."""

    places: Mapping[str, int]
    """Its position on each axis."""
    score: float
    """Higher is better. A trial that cannot win gets the lowest score seen, to avoid a cliff in the modelled objective."""
    wins: bool
    """False: out of memory, wrong or failed, i.e. a violated constraint."""


class AdviserStrategy(Strategy):
    """Passes all trials to a stateless optimizer at each call, asks it for a configuration, and discards it.

    1. The first `STARTUP_TRIALS` come from `random`.
    2. A known or illegal answer costs nothing: the optimizer is asked again, up to `asks` times in a small space, where most
       combinations of the domains do not exist, and up to three times in a large one.
    3. Then the unknown configuration nearest to the last answer on its axes is taken; in a space too large to list, an unknown
       neighbour of that answer. If there is none, `random` chooses.
    """

    asks = 20
    """Maximum number of asks in a small space."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._random = RandomStrategy()
        self._listing = Listing()

    @abstractmethod
    def answers(
        self, axes: Axes, observed: Sequence[ObservedTrial], running: Sequence[Mapping[str, int]], seed: int
    ) -> Iterator[Mapping[str, int]]:
        """Yield positions on the axes; the next one is requested when the last one was unusable.

        Args:
            axes: at least one.
            observed: finished trials.
            running: positions of the pending trials.
            seed: differs for each number of trials.
        """

    def propose(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], count: int, seed: int
    ) -> list[TrialConfig]:
        chosen: list[TrialConfig] = []
        while len(chosen) < count:
            config = self._next(candidates, history, [*pending, *chosen], seed)
            if config is None:
                break
            chosen.append(config)
        return chosen

    def _next(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], seed: int
    ) -> TrialConfig | None:
        tried = sum(trial.attempts > 0 for trial in history) + len(pending)
        if tried >= STARTUP_TRIALS:
            config = self._ask_optimizer(candidates, history, pending, seed)
            if config is not None:
                return config
        return next(iter(self._random.propose(candidates, history, pending, 1, seed)), None)

    def _ask_optimizer(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], seed: int
    ) -> TrialConfig | None:
        axes = Axes(candidates)
        hashes = known_hashes(history, pending)
        listed = self._listing.of(candidates)
        untried = None if listed is None else [config for config in listed if config.hash not in hashes]
        if not axes.sizes or untried == []:
            return None
        running = [axes.places(config) for config in pending]
        answers = self.answers(axes, self._observed(history, axes), running, _seed(seed, len(history) + len(pending)))
        places: Mapping[str, int] = {}
        # Maximum number of asks, in a large space, before a configuration near the last answer is taken.
        for places, _ in zip(answers, range(3 if untried is None else self.asks), strict=False):
            config = axes.config(places)
            if config.hash not in hashes and not candidates.check(config):
                return config
        if untried is None and places:
            untried = [neighbour for neighbour in candidates.neighbours(axes.config(places)) if neighbour.hash not in hashes]
            return min(untried, key=lambda neighbour: stable_hash([seed, neighbour.hash]), default=None)
        return axes.nearest(places, untried or (), seed) if places else None

    def _score_of(self, trial: TrialRecord) -> float | None:
        """Return the score; a pruned trial is slow, not infeasible (trials are pruned only where samples/s is the score)."""
        score = self._score(trial)
        if score is not None or trial.outcome is not Outcome.PRUNED or trial.result is None:
            return score
        measured = trial.result.samples_per_second
        return None if measured is None else measured.mean

    def _observed(self, history: Sequence[TrialRecord], axes: Axes) -> list[ObservedTrial]:
        informative = [trial for trial in history if trial.outcome is not None and trial.outcome not in UNINFORMATIVE]
        scores = [score if score is not None and math.isfinite(score) else None for score in map(self._score_of, informative)]
        lowest = min((score for score in scores if score is not None), default=0.0)
        return [
            ObservedTrial(places=axes.places(trial.config), score=lowest if score is None else score, wins=score is not None)
            for trial, score in zip(informative, scores, strict=True)
        ]


def _seed(seed: int, number: int) -> int:
    return int(stable_hash([seed, number]), 16) % 2**32


class StudyStrategy(AdviserStrategy):
    """An in-memory study with an Optuna sampler; pending trials are running ones.

    An unusable answer stays a running trial: samplers avoid running trials, so the next answer differs.
    """

    @abstractmethod
    def sampler(self, seed: int) -> BaseSampler:
        """Create the sampler."""

    def attributes(self, number: int) -> dict[str, Any]:  # noqa: ARG002  most samplers store nothing with a trial
        """System attributes that the sampler would have stored with the trial of that number."""
        return {}

    def answers(
        self, axes: Axes, observed: Sequence[ObservedTrial], running: Sequence[Mapping[str, int]], seed: int
    ) -> Iterator[Mapping[str, int]]:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(direction="maximize", sampler=self.sampler(seed))
        distributions = {name: _distribution(size, name in axes.ordered) for name, size in axes.sizes.items()}
        study.add_trials([self._ended(number, trial, distributions) for number, trial in enumerate(observed)])
        study.add_trials(
            [create_trial(state=TrialState.RUNNING, params=dict(trial), distributions=distributions) for trial in running]
        )
        while True:
            yield study.ask(distributions).params

    def _ended(self, number: int, observed: ObservedTrial, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
        return create_trial(
            value=observed.score,
            params=dict(observed.places),
            distributions=distributions,
            constraints={"can_win": 0.0 if observed.wins else 1.0},
            system_attrs=self.attributes(number),
        )


def _distribution(size: int, ordered: bool) -> BaseDistribution:
    return IntDistribution(0, size - 1) if ordered else CategoricalDistribution(tuple(range(size)))


class TpeStrategy(StudyStrategy):
    """`TPESampler`, multivariate and with a constant liar for running trials (Watanabe 2023, arXiv 2304.11127)."""

    def sampler(self, seed: int) -> BaseSampler:
        return TPESampler(n_startup_trials=1, seed=seed)


class GpStrategy(StudyStrategy):
    """`GPSampler`: log expected improvement (Ament 2023, arXiv 2310.20708) times the probability that a trial can win, which a
    second process learns from out-of-memory and failed trials (Gardner 2014, proceedings.mlr.press/v32/gardner14).

    Each ask refits both: 1.6 s after 200 trials, and several times that while other trials run. So in a small space it is asked
    once, and the configuration nearest to its answer is taken: another ask would hardly move the optimum.
    """

    asks = 1

    def sampler(self, seed: int) -> BaseSampler:
        return GPSampler(n_startup_trials=1, seed=seed, warn_independent_sampling=False)


class Nsga2Strategy(StudyStrategy):
    """`NSGAIISampler` (Deb 2002, doi 10.1109/4235.996017) with generations of a few trials in the order of the rows.

    With one objective it sorts by the constraint, then by the score. Known children cost nothing: others are bred instead.
    """

    _POPULATION = STARTUP_TRIALS
    """Trials per generation. With Optuna's default of 50, a whole sweep would be a random search."""

    def sampler(self, seed: int) -> BaseSampler:
        return NSGAIISampler(population_size=self._POPULATION, seed=seed)

    def attributes(self, number: int) -> dict[str, Any]:
        return {"NSGAIISampler:generation": number // self._POPULATION}
