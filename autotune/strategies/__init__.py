"""Strategies by name, and any strategy as a search for the Pareto front of throughput and memory."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from autotune.errors import RequestError
from autotune.request.component_names import PREDICTING, STRATEGIES, strategy_names
from autotune.strategies.strategy import Candidates, Score, Strategy
from search_spaces.plugins import PluginGroup, load_plugin
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

if TYPE_CHECKING:
    from autotune.strategies.guided.described import Guide


def make_strategy(name: str, score: Score, guide: "Guide | None" = None) -> Strategy:
    """Return the strategy of that name. Its module is imported here: optimizers take long to load.

    Args:
        name: of the strategy.
        score: what it maximises.
        guide: for strategies that predict.

    Raises:
        RequestError: the name is unknown, or it predicts and no guide is given.
    """
    if name not in strategy_names():
        raise RequestError("strategy", f"{name!r} is not known", f"use one of {', '.join(strategy_names())}")
    if name in PREDICTING and guide is None:
        raise RequestError("strategy", f"{name} has nothing to predict with", "use tpe")
    if name in STRATEGIES:
        module, _, attribute = STRATEGIES[name].partition(":")
        make = getattr(import_module(module), attribute)
    else:
        make = load_plugin(PluginGroup.STRATEGIES, name)
    strategy: Strategy = make(score, guide) if name in PREDICTING else make(score)
    return strategy


SHARES = (0.0, 0.5, 1.0, 0.25, 0.75)
"""Shares of memory in the score, in the order of use: fastest, middle, smallest, then the values between."""


class FrontStrategy(Strategy):
    """Chooses each configuration by one weight of samples/s and memory, which depends on the number of trials so far.

    1. With n trials finished or running, the next one's share of memory is number n modulo 5 of `SHARES`.
    2. A strategy for that share proposes one configuration by the score (1 - share) log rate - share log peak
       (`Ranking.score`). All strategies learn from all trials.

    Cycling through weights follows ParEGO [Knowles 2006], which draws them and uses the Chebyshev norm. The sum of logarithms
    used here is linear: no trial's score depends on the range of the others, and predictions add up like scores. Such a sum
    never has its maximum in a concave part of the front (of logarithms); the best-config lists such points if measured.
    """

    def __init__(self, make_for_share: Callable[[float], Strategy]) -> None:
        """`make_for_share`: creates the strategy for a share; called once per share."""
        self._strategies = [make_for_share(share) for share in SHARES]

    def propose(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], count: int, seed: int
    ) -> list[TrialConfig]:
        chosen: list[TrialConfig] = []
        while len(chosen) < count:
            waiting = [*pending, *chosen]
            turn = (len(history) + len(waiting)) % len(self._strategies)
            proposed = self._strategies[turn].propose(candidates, history, waiting, 1, seed)
            if not proposed:
                break
            chosen += proposed
        return chosen
