"""The contract of a strategy, and strategies by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from autotune.errors import RequestError
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

Score = Callable[[TrialRecord], float | None]
"""How good a finished trial is, more being better; None: it cannot win."""


class Strategy(ABC):
    """Chooses configurations.

    `propose` is a pure function of its arguments: another process that is given the same ones answers the same, so that a
    job is resumed from its rows alone. An implementation may keep what is dear to compute, never what it was asked before.
    """

    @abstractmethod
    def propose(
        self,
        candidates: SearchSpace,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        """Return up to `count` canonical configurations, none of them in `history` or `pending`; none: all were tried.

        Args:
            candidates: the legal configurations.
            history: search trials that have an outcome, by number, refused ones included.
            pending: configurations that are wanted or running.
            count: how many are wanted, at least 1.
            seed: of the job.
        """


def known_hashes(history: Sequence[TrialRecord], pending: Sequence[TrialConfig]) -> set[str]:
    """Hashes of the configurations that must not be proposed again."""
    return {trial.config_hash for trial in history} | {config.hash for config in pending}


def make_strategy(name: str, score: Score, choices: Collection[str] = ("tpe", "random", "grid")) -> Strategy:
    """Return the strategy of that name; `score` is what it makes the most of.

    Raises:
        RequestError: there is none.
    """
    # Each is imported where it is asked for: Optuna takes long to load, and only one of them needs it.
    if name == "tpe":
        from autotune.strategies.tpe import TpeStrategy

        return TpeStrategy(score)
    if name == "random":
        from autotune.strategies.random import RandomStrategy

        return RandomStrategy()
    if name == "grid":
        from autotune.strategies.grid import GridStrategy

        return GridStrategy()
    raise RequestError("strategy", f"{name!r} is not known", f"use one of {', '.join(choices)}")
