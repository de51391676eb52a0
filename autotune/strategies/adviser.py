"""What strategies share that ask an optimizer from elsewhere, which knows neither our rules nor what runs."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.strategies.axes import Axes, Listing
from autotune.strategies.random import RandomStrategy
from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig, stable_hash
from storage.records import TrialRecord

STARTUP_TRIALS = 8
"""Trials that `random` chooses before there is something to learn from."""
ASKS = 3
"""Times that the adviser is asked before something near its last answer is taken, where there are many configurations."""
UNTOLD = (Outcome.CANCELLED, Outcome.LOST, Outcome.PREEMPTED)
"""Outcomes that say nothing of the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A trial as an adviser hears of it."""

    places: Mapping[str, int]
    """Where it lies on the axes."""
    score: float
    """More is better; of a trial that cannot win the lowest that was seen: a cliff would be taken for the objective's shape."""
    wins: bool
    """False: out of memory, wrong, failed: a violated constraint."""


class AdviserStrategy(Strategy):
    """Tells an adviser without a memory of its own all rows at each call, asks it, and forgets it.

    1. The first `STARTUP_TRIALS` come from `random`.
    2. An answer that is known or illegal costs nothing: the adviser is asked again, up to `asks` times where there are few
       configurations, where most of what the domains combine to does not exist, and `ASKS` times where there are many.
    3. Then the unknown configuration is taken that lies nearest to its last answer on its own axes; where there are too many
       to list, an unknown neighbour of that answer. Where there is none, `random` answers.
    """

    asks = 20
    """Times that it is asked where there are few configurations."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._random = RandomStrategy()
        self._listing = Listing()

    @abstractmethod
    def answers(
        self, axes: Axes, told: Sequence[Told], running: Sequence[Mapping[str, int]], seed: int
    ) -> Iterator[Mapping[str, int]]:
        """Places on the axes, one after the other, each asked for when the one before was of no use.

        Args:
            axes: at least one.
            told: trials that have an outcome.
            running: where pending trials lie.
            seed: another one for each number of trials.
        """

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
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
            config = self._asked(candidates, history, pending, seed)
            if config is not None:
                return config
        return next(iter(self._random.propose(candidates, history, pending, 1, seed)), None)

    def _asked(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], seed: int
    ) -> TrialConfig | None:
        axes = Axes(candidates)
        known = known_hashes(history, pending)
        listed = self._listing.of(candidates)
        left = None if listed is None else [config for config in listed if config.hash not in known]
        if not axes.sizes or left == []:
            return None
        running = [axes.places(config) for config in pending]
        answers = self.answers(axes, self._told(history, axes), running, _seed(seed, len(history) + len(pending)))
        places: Mapping[str, int] = {}
        for places, _ in zip(answers, range(ASKS if left is None else self.asks), strict=False):
            config = axes.config(places)
            if config.hash not in known and not candidates.check(config):
                return config
        if left is None and places:
            left = [near for near in candidates.neighbours(axes.config(places)) if near.hash not in known]
            return min(left, key=lambda near: stable_hash([seed, near.hash]), default=None)
        return axes.nearest(places, left or (), seed) if places else None

    def _scored(self, trial: TrialRecord) -> float | None:
        """A trial that was ended early is slow, not impossible: trials are ended early where samples/s are the score."""
        score = self._score(trial)
        return score if score is not None else _pruned_rate(trial)

    def _told(self, history: Sequence[TrialRecord], axes: Axes) -> list[Told]:
        heard = [trial for trial in history if trial.outcome is not None and trial.outcome not in UNTOLD]
        scores = [score if score is not None and math.isfinite(score) else None for score in map(self._scored, heard)]
        lowest = min((score for score in scores if score is not None), default=0.0)
        return [
            Told(places=axes.places(trial.config), score=lowest if score is None else score, wins=score is not None)
            for trial, score in zip(heard, scores, strict=True)
        ]


def _pruned_rate(trial: TrialRecord) -> float | None:
    measured = trial.result.samples_per_second if trial.result is not None else None
    return measured.mean if trial.outcome is Outcome.PRUNED and measured is not None else None


def _seed(seed: int, number: int) -> int:
    return int(stable_hash([seed, number]), 16) % 2**32
